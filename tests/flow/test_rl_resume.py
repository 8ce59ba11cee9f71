"""A run that was stopped goes on where its newest whole checkpoint is (R33)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.flow.jobs import run_job, start_job

STEPS = 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path, dense_model: Path) -> None:
    saving = ("--checkpoint.interval", "1")
    first = start_job(tmp_path, dense_model, *saving, max_steps=STEPS)
    try:
        first.wait_for_step(2)
        os.kill(first.process.pid, signal.SIGINT)
        assert first.finish()[0] == 130
    finally:
        first.end()
    done = first.summary()["steps"]
    assert 2 <= done < STEPS

    second = run_job(tmp_path, dense_model, *saving, "--resume", max_steps=STEPS)
    facts = json.loads((second.run.configs / "trainer.json").read_text())["facts"]
    assert facts["attempt"] == 2
    assert 2 <= facts["start_step"] <= done + 1
    summary = second.summary()
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["payload"]["outstanding"] == summary["payload"]["double_frees"] == 0
    steps = [line["step"] for line in second.metrics()]
    assert steps[-1] == STEPS
    assert set(steps) == set(range(1, STEPS + 1))
