"""What a resumed run trains on: the same batches with `retain = "checkpoint"`, new ones otherwise (R10)."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from moorage.core.rundir import read_json, whole_checkpoints
from tests.flow.jobs import Job, run_job, start_job, wait_until

STEPS, SAVED = 16, 8
SAVING = ("--checkpoint.interval", str(SAVED))
RETAIN = ("--payload.retain", "checkpoint")
SAME = ("loss", "entropy/mean", "mismatch_kl/mean", "optim/grad_norm", "tokens/real")


def kill_trainer(job: Job, ready: int) -> None:
    """SIGKILL the trainer once the batch of step `ready` and a checkpoint are there; the run must fail."""

    def is_there() -> bool:
        return (job.run.batch(ready) / "READY").exists() and bool(whole_checkpoints(job.run))

    try:
        wait_until(lambda: is_there() or job.process.poll() is not None, 120.0)
        assert job.process.poll() is None, job.finish()
        beat = read_json(job.run.alive / "trainer.json")
        assert beat is not None
        os.kill(beat["pid"], signal.SIGKILL)
        code, out, err = job.finish()
        assert code == 1, f"{out}\n{err}"
        assert "trainer" in err
    finally:
        job.end()


def trained(job: Job) -> dict[int, tuple[float, ...]]:
    """Step to the figures that say what it was trained on."""
    return {row["step"]: tuple(row[name] for name in SAME) for row in job.metrics()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("retain", ["checkpoint", "fetched"])
def test_repeated_steps_train_on_the_same_batches_only_when_these_are_retained(
    tmp_path: Path, dense_model: Path, retain: str
) -> None:
    settings = (*SAVING, "--payload.retain", retain)
    killed = start_job(tmp_path, dense_model, *settings, max_steps=STEPS)
    kill_trainer(killed, ready=STEPS)  # the last batch is shipped, its checkpoint is not
    assert whole_checkpoints(killed.run) == [SAVED]
    first = trained(killed)
    resumed = run_job(tmp_path, dense_model, *settings, "--resume", max_steps=STEPS)

    second = trained(resumed)
    steps = [row["step"] for row in resumed.metrics()]
    assert steps == list(range(1, STEPS + 1)), "each step is in the file once"
    repeated = [step for step in first if step > SAVED]
    assert {SAVED + 1, SAVED + 2} <= set(repeated)
    for step in repeated:
        assert any(first[step])
        assert (first[step] == second[step]) == (retain == "checkpoint"), step
    summary = resumed.summary()
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert whole_checkpoints(resumed.run) == [SAVED, STEPS]
    shipped = {row["step"] for row in resumed.metrics("orchestrator")}
    assert shipped == set(range(1, STEPS + 1)), "rows of kept batches are of the first attempt"
    payload = summary["payload"]
    assert payload["outstanding"] == payload["double_frees"] == payload["unknown"] == 0
    assert not [path for path in resumed.run.spool.rglob("*") if path.name.endswith(".safetensors")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_forced_onto_a_batch_without_payloads_stops_and_says_what_to_set(
    tmp_path: Path, dense_model: Path
) -> None:
    killed = start_job(tmp_path, dense_model, *SAVING, max_steps=STEPS)
    batch, saved = killed.run.batch(SAVED + 1), tmp_path / "saved"
    try:
        wait_until((batch / "READY").exists, 120.0)
        shutil.copytree(batch, saved)  # the batch goes once it is trained
    except BaseException:
        killed.end()
        raise
    kill_trainer(killed, ready=SAVED + 2)
    assert whole_checkpoints(killed.run) == [SAVED]
    shutil.rmtree(batch, ignore_errors=True)
    shutil.copytree(saved, batch)

    forced = start_job(tmp_path, dense_model, *SAVING, *RETAIN, "--resume", max_steps=STEPS)
    try:
        code, out, err = forced.finish()
    finally:
        forced.end()
    assert code == 1, out
    assert f"step {SAVED + 1}:" in err
    assert 'payload.retain = "checkpoint"' in err
    assert [row["step"] for row in forced.metrics()] == list(range(1, len(forced.metrics()) + 1))
    assert forced.summary()["status"] == "failed"
