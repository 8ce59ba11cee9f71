"""kill -9 at random moments and resume: each task is trained or dropped once in the lineage that counts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from moorage.core.rundir import RunDir, ready_steps, step_of, whole_checkpoints
from moorage.exchange.batches import read_checkpoint_state
from moorage.monitor.files import read_metrics
from moorage.orchestrator.progress import decode_state
from tests.flow.test_orchestrator_run import make_orchestrator, make_process_config, run_with_trainer
from tests.unit.orchestrator.scripted import ScriptedEnv, ScriptedStore, ScriptedTrainer, reply_after

STEPS, MAX_LAG = 24, 2
NUM_TASKS = 200


def heavy_tail(rng: random.Random) -> float:
    return 0.004 * rng.lognormvariate(0.0, 1.0)


def clean_up_for_resume(run: RunDir) -> int:
    """What the launcher does first: the newest whole checkpoint counts, later work goes. Returns its step."""
    whole = whole_checkpoints(run)
    at = whole[-1] if whole else 0
    for folder in (run.weights, run.batches, run.root / "episodes", run.checkpoints):
        for path in folder.glob("step_*") if folder.is_dir() else []:
            step = step_of(path)
            if step is not None and step > at:
                shutil.rmtree(path)
    return at


def attempt(root: Path, number: int, first: int) -> None:
    """One attempt with its trainer, in this process. Settled tasks are noted as they are."""

    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store, heavy_tail, seed=number), num_tasks=NUM_TASKS)
        config = make_process_config(
            root,
            STEPS,
            start_step=first,
            checkpoint_interval=3,
            max_off_policy_steps=MAX_LAG,
            group_deadline_s=0.1,
        )
        state = None
        if first > 1:
            folder = RunDir(root / "run").checkpoint(first - 1, "orchestrator")
            state = decode_state(read_checkpoint_state(folder), ("script",))
            env.streams = {name: position for name, (_, position) in state.streams.items()}
        orchestrator = make_orchestrator(config, env, state=state)
        note_settled(orchestrator, root / "settled.jsonl", number)
        trainer = ScriptedTrainer(
            orchestrator.run_dir, store, first=first, last=STEPS, step_s=0.01, checkpoint=3
        )
        await run_with_trainer(orchestrator, trainer)
        still_open = [task.task["key"] for task in orchestrator.unfinished.tasks]
        (root / "open.json").write_text(json.dumps(still_open))

    asyncio.run(scenario())


def note_settled(orchestrator, path: Path, number: int) -> None:
    """Write a line when a task is trained or dropped for good, with the step whose window it was."""
    file = path.open("a")
    tasks = orchestrator.unfinished
    settle = tasks.settle

    def settle_and_note(group_id: str) -> None:
        before = dict(tasks._tasks)
        settle(group_id)
        if group_id in before:
            line = {
                "attempt": number,
                "step": orchestrator.progress.step,
                "key": before[group_id].task["key"],
            }
            file.write(json.dumps(line) + "\n")
            file.flush()

    orchestrator.sink._on_settled = settle_and_note


def run_in_child(root: Path, number: int, first: int, kill_after_s: float | None) -> bool:
    """Fork, run an attempt there, maybe kill it. True when it ended by itself."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt(root, number, first)
            code = 0
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return True
    return False


def run_lineage(root: Path, num_kills: int, seed: int) -> tuple[list[dict], list[str]]:
    """Attempts with `num_kills` kills, then one to the end. Lines that count, and the tasks still open."""
    rng = random.Random(seed)
    run = RunDir(root / "run")
    starts: list[int] = []
    for number in range(num_kills + 1):
        starts.append(clean_up_for_resume(run))
        kill_after_s = None if number == num_kills else rng.uniform(0.05, 1.0)
        if run_in_child(root, number, starts[-1] + 1, kill_after_s):
            break
    ends = [*starts[1:], STEPS + 1]  # what an attempt did after the checkpoint it was resumed from is void
    lines = [json.loads(line) for line in (root / "settled.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] <= min(ends[line["attempt"] :])]
    return counted, json.loads((root / "open.json").read_text())


def check(root: Path, num_kills: int, seed: int) -> None:
    counted, still_open = run_lineage(root, num_kills, seed)
    times = Counter(line["key"] for line in counted) + Counter(still_open)
    # the first so many tasks, whole epochs and a part of one: nothing twice, nothing skipped
    sampled = Counter(f"k{index % NUM_TASKS}" for index in range(times.total()))
    assert times == sampled, {"repeated": times - sampled, "skipped": sampled - times}
    rows = read_metrics(RunDir(root / "run").metrics("orchestrator"))
    assert max(row["off_policy/max"] for row in rows if "off_policy/max" in row) <= MAX_LAG
    assert ready_steps(RunDir(root / "run").weights)[-1] == STEPS


def test_a_kill_and_a_resume_repeat_nothing_and_skip_nothing(tmp_path):
    check(tmp_path, num_kills=2, seed=1)


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_at_random_moments(tmp_path, seed):
    check(tmp_path, num_kills=10, seed=seed)
