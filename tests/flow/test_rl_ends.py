"""A run ends with code 0 within seconds of its last step, however slow the trainer, however few the steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moorage.core.rundir import read_json
from tests.flow.jobs import Job, start_job, wait_until

SAVING = ("--checkpoint.interval", "1")
END_WITHIN_S = 15.0
"""Two cores, eight processes that stop one after the other."""
STOPPED_S, RUNNING_S = 0.2, 0.1


@contextmanager
def slowed(job: Job) -> Iterator[None]:
    """Let the trainer run a third of the time, once it lives."""
    over = threading.Event()
    beat = job.run.alive / "trainer.json"

    def slow() -> None:
        wait_until(lambda: over.is_set() or beat.exists(), 120.0)
        pid = (read_json(beat) or {}).get("pid")
        while pid and not over.is_set():
            try:
                os.kill(pid, signal.SIGSTOP)
                over.wait(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            over.wait(RUNNING_S)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_ends(folder: Path, model: Path, steps: int, *args: str) -> Job:
    """Run to `steps` with a slow trainer; code 0, soon after the last step."""
    job = start_job(folder, model, *SAVING, *args, max_steps=steps)
    try:
        with slowed(job):
            code, out, err = job.finish(240.0)
        ended = time.time()
    finally:
        job.end()
    assert code == 0, f"{out}\n{err}"
    last = job.metrics()[-1]
    assert last["step"] == steps
    assert ended - last["time"] < END_WITHIN_S
    summary = job.summary()
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert summary["payload"]["outstanding"] == summary["payload"]["double_frees"] == 0
    return job


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_step_then_a_resume_at_the_last_then_nothing_left(tmp_path: Path, dense_model: Path) -> None:
    assert_ends(tmp_path, dense_model, 1)
    resumed = assert_ends(tmp_path, dense_model, 2, "--resume")
    config = read_json(resumed.run.configs / "trainer.json") or {}
    assert config["facts"]["start_step"] == 2

    done = start_job(tmp_path, dense_model, *SAVING, "--resume", max_steps=2)
    begun = time.monotonic()
    try:
        code, out, err = done.finish(120.0)
    finally:
        done.end()
    assert code == 0, f"{out}\n{err}"
    assert time.monotonic() - begun < 60
    assert [line["step"] for line in done.metrics()] == [1, 2]
    assert done.summary()["steps"] == 2


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_end(tmp_path: Path, dense_model: Path, steps: int) -> None:
    assert_ends(tmp_path, dense_model, steps)
