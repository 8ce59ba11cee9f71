"""What a checkpoint restores, and which stay: whole ones count, torn ones go."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moorage.config.run import CheckpointConfig
from moorage.config.trainer import OptimizerConfig
from moorage.core.errors import ConfigError
from moorage.core.rundir import RunDir, mark_ready, whole_checkpoints
from moorage.trainer.model import TrainedModel
from moorage.trainer.optimizer import make_optimizer
from moorage.trainer.state import CheckpointStore, Progress, prune_checkpoints
from moorage.trainer.world import World


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


def _store(run: RunDir, module: torch.nn.Module, **optimizer) -> CheckpointStore:
    model = TrainedModel(module, World(0, 1, torch.device("cpu")), None)
    return CheckpointStore(run, model, make_optimizer(module.parameters(), OptimizerConfig(**optimizer)))


def _train(store: CheckpointStore) -> None:
    store.model.module(torch.ones(1, 3)).sum().backward()
    store.optimizer.step()


def test_a_resume_takes_weights_and_moments_from_the_checkpoint_and_settings_from_the_config(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    first = _store(run, torch.nn.Linear(3, 2), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    _train(first)
    first.save(Progress(3, tokens=70, samples=5))
    first.close()  # what was written by then counts
    second = _store(run, torch.nn.Linear(3, 2), lr=1e-3, weight_decay=0.25, betas=(0.5, 0.75), eps=1e-4)
    assert second.load(3) == Progress(3, tokens=70, samples=5)
    second.close()
    (group,) = second.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (
        1e-3,
        0.25,
        (0.5, 0.75),
        1e-4,
    )
    for own, saved in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(own, saved)
        state, expected = second.optimizer.state[own], first.optimizer.state[saved]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    before = second.model.module.bias.detach().clone()
    second.optimizer.zero_grad()
    _train(second)
    # By hand, Adam's second step with gradient 1: moments 0.1 and 0.05 of the first, betas of the second.
    mean, square = 0.5 * 0.1 + 0.5, 0.75 * 0.05 + 0.25
    step = (mean / (1 - 0.5**2)) / ((square / (1 - 0.75**2)) ** 0.5 + 1e-4)
    expected = before * (1 - 1e-3 * 0.25) - 1e-3 * step
    torch.testing.assert_close(second.model.module.bias.detach(), expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 3), r"2 tensors differ, 1.bias has shape \(3,\) there and None in the model"),
        ((3, 3, 3, 3), r"2 tensors differ, 2.bias has shape None there"),
        ((3, 4, 3), r"0.bias has shape \(3,\) there and \(4,\) in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, sizes: tuple, message: str) -> None:
    def stack(*widths: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(widths)))

    saving = _store(RunDir(tmp_path), stack(3, 3, 3))
    saving.save(Progress(1))
    saving.close()
    with pytest.raises(ConfigError, match=message):
        _store(RunDir(tmp_path), stack(*sizes)).load(1)
