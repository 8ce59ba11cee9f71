"""kill -9 of the orchestrator in a real run, then resume: no leak, no task of the epoch skipped (R33)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from moorage.core.rundir import RunDir, read_json, ready_steps, whole_checkpoints
from moorage.exchange.batches import read_checkpoint_state
from moorage.orchestrator.progress import State, decode_state
from tests.flow.jobs import run_job, start_job, wait_until

STEPS, SAVED = 20, 6
SAVING = ("--checkpoint.interval", str(SAVED))
STREAM = "train/reverse_text"


def read_state(run: RunDir, step: int) -> State:
    return decode_state(read_checkpoint_state(run.checkpoint(step, "orchestrator")), ("reverse_text",))


def open_tasks(state: State) -> set[int]:
    return {task.task["data"]["idx"] for task in state.open_tasks}


def settled_tasks(run: RunDir, first: int, last: int) -> list[int]:
    """Tasks whose episodes came back in the windows of these steps (in some, none did)."""
    paths = [run.traces(step, "train", "all") for step in range(first, last + 1)]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line)["task"]["data"]["idx"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_orchestrator_is_resumed_without_a_leak_and_skips_no_task(
    tmp_path: Path, dense_model: Path
) -> None:
    killed = start_job(tmp_path, dense_model, *SAVING, max_steps=STEPS)
    try:
        killed.wait_for_step(SAVED + 1)
        wait_until(lambda: whole_checkpoints(killed.run), 60.0)
        beat = read_json(killed.run.alive / "orchestrator.json")
        assert beat is not None
        os.kill(beat["pid"], signal.SIGKILL)
        code, out, err = killed.finish()
    finally:
        killed.end()
    assert code == 1, f"{out}\n{err}"
    assert "orchestrator" in err
    at = whole_checkpoints(killed.run)[-1]
    assert at < STEPS
    before = read_state(killed.run, at)

    resumed = run_job(tmp_path, dense_model, *SAVING, "--resume", max_steps=STEPS)
    summary = resumed.summary()
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    payload = summary["payload"]
    assert payload["outstanding"] == payload["double_frees"] == payload["unknown"] == 0
    assert payload["kept"] > 0
    assert ready_steps(resumed.run.weights)[-1] == STEPS

    after = read_state(resumed.run, STEPS)
    assert after.streams[STREAM] > before.streams[STREAM]
    served = set(settled_tasks(resumed.run, 1, STEPS))
    epoch, num_sampled = after.streams[STREAM]
    assert epoch == 0
    assert len(served | open_tasks(after)) == num_sampled  # every task that was ever sampled, and no other
    again = open_tasks(before) & set(settled_tasks(resumed.run, at + 1, STEPS))
    assert again == open_tasks(before)  # what was under way at the checkpoint was served again
