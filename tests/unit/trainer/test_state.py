"""Which checkpoints stay: whole ones count, torn ones go."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.config.run import CheckpointConfig
from moorage.core.rundir import RunDir, mark_ready, whole_checkpoints
from moorage.trainer.state import prune_checkpoints


def _run(tmp_path: Path, whole: list[int], torn: list[int]) -> RunDir:
    run = RunDir(tmp_path)
    for step in [*whole, *torn]:
        for part in ("trainer", "orchestrator"):
            run.checkpoint(step, part).mkdir(parents=True)
            if step in whole or part == "trainer":
                mark_ready(run.checkpoint(step, part))
    return run


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({}, [2, 4, 6, 8]),
        ({"keep_last": 1}, [8]),
        ({"keep_last": 2}, [6, 8]),
        ({"keep_last": 1, "keep_interval": 4}, [4, 8]),
        ({"keep_interval": 3}, [6, 8]),
    ],
)
def test_keep_last_and_keep_interval_count_whole_checkpoints(
    tmp_path: Path, config: dict, left: list[int]
) -> None:
    run = _run(tmp_path, whole=[2, 4, 6, 8], torn=[3, 10])
    prune_checkpoints(run, CheckpointConfig(interval=2, **config))
    assert whole_checkpoints(run) == left
    assert not run.checkpoint(3, "trainer").exists()  # older than the newest whole one: nobody will finish it
    assert run.checkpoint(10, "trainer").exists()  # the orchestrator's part may still come


def test_without_a_whole_checkpoint_nothing_is_removed(tmp_path: Path) -> None:
    run = _run(tmp_path, whole=[], torn=[2, 4])
    assert prune_checkpoints(run, CheckpointConfig(interval=2, keep_last=1)) == []
    assert run.checkpoint(2, "trainer").exists()
