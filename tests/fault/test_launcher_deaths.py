"""A run of real processes when something is killed at a random moment (R35)."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.jobs import Job, start_job, started_by, wait_until

ENDS_WITHIN_S = 30.0
KINDS = ("inference", "envs/train/", "orchestrator", "trainer")


@pytest.fixture
def job(tmp_path: Path, dense_model: Path) -> Iterator[Job]:
    """A job that would run for very long, killed with all that it started when the test ends."""
    started = start_job(tmp_path, dense_model, max_steps=100_000)
    yield started
    started.end()


def let_it_run(job: Job) -> None:
    """Until a random moment after the first step."""
    job.wait_for_step(1)
    time.sleep(random.uniform(0.0, 3.0))


def assert_ended(job: Job, status: str, began: float) -> None:
    """Within the time, with nothing alive, and with its papers in order."""
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert job.processes() == []
    assert json.loads(job.run.end.read_text())["status"] == status
    summary = job.summary()
    assert summary["status"] == status
    assert summary["steps"] >= 1


def pid_of(job: Job, kind: str) -> int:
    for path in job.run.alive.rglob("*.json"):
        beat = json.loads(path.read_text())
        if beat["process"].startswith(kind):
            return beat["pid"]
    raise AssertionError(f"no {kind} is alive")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_everything_in_order_with_130(job: Job) -> None:
    let_it_run(job)
    began = time.monotonic()
    os.kill(job.process.pid, signal.SIGINT)
    code, out, _ = job.finish(60.0)
    assert code == 130
    assert_ended(job, "cancelled", began)
    assert "stopping in order" in out
    payload = job.summary()["payload"]
    assert payload["kept"] == sum(payload["freed"].values())
    assert payload["outstanding"] == payload["double_frees"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_ends_the_run_with_its_name(job: Job, kind: str) -> None:
    let_it_run(job)
    victim = pid_of(job, kind)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code, out, err = job.finish(60.0)
    assert code == 1, (out, err)
    assert_ended(job, "failed", began)
    assert "was killed by SIGKILL" in err
    assert kind in err
    assert "The end of" in out
    assert job.summary()["error"].startswith(kind)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_launcher_takes_its_children_along(job: Job) -> None:
    let_it_run(job)
    pid = job.process.pid
    assert len(started_by(pid)) >= len(KINDS)
    job.process.kill()
    job.process.communicate()
    wait_until(lambda: not started_by(pid), ENDS_WITHIN_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_while_everything_starts_ends_it_too(job: Job) -> None:
    wait_until(lambda: len(job.processes()) >= len(KINDS), 60.0)
    time.sleep(random.uniform(0.0, 4.0))
    began = time.monotonic()
    os.kill(job.process.pid, signal.SIGINT)
    code, _, _ = job.finish(60.0)
    assert code == 130
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert job.processes() == []
    assert job.summary()["status"] == "cancelled"
