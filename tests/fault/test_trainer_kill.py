"""kill -9 of the trainer at random moments: resume works from the newest whole checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from moorage.core.rundir import mark_ready, ready_steps, whole_checkpoints
from moorage.records.sample import TrainSample
from tests.support.training import SyntheticRun


class _Orchestrator(threading.Thread):
    """Writes the orchestrator's part of each checkpoint soon after the trainer's."""

    def __init__(self, run: SyntheticRun, steps: int) -> None:
        super().__init__(daemon=True)
        self.run_dir = run.run
        self.steps = steps
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            for step in range(1, self.steps + 1):
                if (self.run_dir.checkpoint(step, "trainer") / "READY").exists():
                    mark_ready(self.run_dir.checkpoint(step, "orchestrator"))


def _losses(run: SyntheticRun) -> list[dict[int, float]]:
    """Step to loss, one table per attempt: an attempt's steps rise."""
    attempts: list[dict[int, float]] = []
    last = 1 << 30
    for row in run.metrics():
        if row["step"] <= last:
            attempts.append({})
        last = int(row["step"])
        attempts[-1][last] = row["loss"]
    return attempts


def _config(run: SyntheticRun, model: Path, start_step: int, steps: int):
    return run.config(
        model,
        steps,
        facts__start_step=start_step,
        checkpoint__interval=1,
        checkpoint__keep_last=3,
        payload__retain="checkpoint",
    )


def _resume_until_done(
    run: SyntheticRun, model: Path, kills: int, seed: int, payloads: dict[int, list[str]]
) -> int:
    """Kill and resume; returns how many kills hit a running trainer."""
    rng, steps = random.Random(seed), len(payloads)
    hits = 0
    for attempt in range(kills + 1):
        start = (whole_checkpoints(run.run) or [0])[-1] + 1
        if start > steps:
            break
        for version in ready_steps(run.run.weights):
            if version >= start:
                os.remove(run.run.weight(version) / "READY")
        # What a dead attempt still held of covered steps is freed by the env server that the next one greets.
        run.spool.free([key for step in range(1, start) for key in payloads[step]], "shutdown")
        trainer = run.start_trainer(_config(run, model, start, steps))
        if attempt == kills:
            assert trainer.wait(110) == 0, run.log_text()
            break
        _wait_for_steps(run, trainer, rng.randint(1, 3))
        time.sleep(rng.uniform(0.0, 0.3))
        trainer.send_signal(signal.SIGKILL)
        hits += trainer.wait(10) == -signal.SIGKILL
    return hits


def _wait_for_steps(run: SyntheticRun, trainer, count: int) -> None:
    had = len(run.metrics())
    deadline = time.monotonic() + 110
    while len(run.metrics()) < had + count and trainer.poll() is None:
        assert time.monotonic() < deadline, run.log_text()
        time.sleep(0.01)


def _check_kills(tmp_path: Path, model: Path, kills: int) -> None:
    steps = 4 * kills + 4  # more than that many attempts of three steps and a moment get through
    with SyntheticRun(tmp_path) as run:
        payloads = {step: [s.payload.id for s in run.write_step(step)] for step in range(1, steps + 1)}
        orchestrator = _Orchestrator(run, steps)
        orchestrator.start()
        hits = _resume_until_done(run, model, kills, kills, payloads)
        orchestrator.stopped.set()
        attempts = _losses(run)
        run.spool.catch_up()
        ledger = run.spool.ledger()
    assert hits == kills
    merged: dict[int, float] = {}
    for attempt in attempts:
        for step, loss in attempt.items():
            # A step that ran twice had the same payloads and the same weights: the same loss, bit for bit.
            assert merged.setdefault(step, loss) == loss, step
    assert sorted(merged) == list(range(1, steps + 1))
    assert (ledger.outstanding, ledger.double_frees) == (0, 0)


@pytest.mark.timeout(300)
def test_a_killed_trainer_repeats_its_steps_bit_for_bit(tmp_path: Path, dense_model: Path) -> None:
    _check_kills(tmp_path, dense_model, kills=1)


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_ten_kills_at_random_moments_never_corrupt_the_run(tmp_path: Path, dense_model: Path) -> None:
    _check_kills(tmp_path, dense_model, kills=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four(tmp_path: Path, dense_model: Path) -> None:
    losses = []
    with SyntheticRun(tmp_path, num_ranks=2) as run:
        for step in (1, 2):
            run.write_step(step)
        first = run.config(dense_model, 2, checkpoint__interval=2)
        assert run.start_trainer(first).wait(280) == 0, run.log_text()
        samples = run.make_samples(8)
        for ranks in (2, 1, 4):
            run.num_ranks = ranks
            run.write_samples(3, [_keep_again(run, sample) for sample in samples])
            resumed = run.config(dense_model, 3, facts__start_step=3)
            assert run.start_trainer(resumed).wait(280) == 0, run.log_text()
            losses.append(run.metrics()[-1]["loss"])
            shutil.rmtree(run.run.batch(3))
            shutil.rmtree(run.run.weight(3))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def _keep_again(run: SyntheticRun, sample: TrainSample) -> TrainSample:
    """The same sample with a payload of its own: a step frees what it trained on."""
    return msgspec.structs.replace(sample, payload=run.keep(run.kept[sample.payload.id]))
