# ruff: noqa: ARG005 - scripted partners take what the real ones take
"""Measuring while training: the same tasks each time, once per due version, and the last one to its end."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from moorage.core.rundir import RunDir
from moorage.exchange.batches import read_checkpoint_state
from moorage.launcher.resume import clean_after
from moorage.monitor.files import read_metrics
from moorage.orchestrator.loop import missing_measurements
from moorage.orchestrator.progress import Progress, decode_state
from tests.flow.test_orchestrator_dispatch import read_lines
from tests.flow.test_orchestrator_run import (
    assert_accounts,
    make_orchestrator,
    make_process_config,
    run_with_trainer,
)
from tests.unit.orchestrator.scripted import ScriptedEnv, ScriptedStore, ScriptedTrainer, reply_after
from tests.unit.orchestrator.test_records import make_state


def measure(
    root,
    steps: int,
    source: dict,
    eval_s: float,
    train_s: float = 0.01,
    group_deadline_s: float = 1800.0,
    prepare: Callable[[ScriptedEnv], None] = lambda evals: None,
    **settings,
):
    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store, lambda rng: train_s))
        evals = ScriptedEnv(store, reply_after(store, lambda rng: eval_s, seed=1))
        prepare(evals)
        block = {"sources": [{"name": "m", "env": {"taskset": {"id": "x"}}, **source}], **settings}
        config = make_process_config(root, steps, eval=block, group_deadline_s=group_deadline_s)
        orchestrator = make_orchestrator(config, env, {"m": evals})
        orchestrator.dispatcher.limits.sample_retry_s = 0.01
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=steps, step_s=0.02)
        assert await run_with_trainer(orchestrator, trainer)
        store.assert_clean()
        assert_accounts(orchestrator)
        rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))
        return evals, [row for row in rows if "eval/m/policy_version" in row]

    return asyncio.run(scenario())


def test_a_subset_of_16_of_200_tasks_is_the_same_at_every_step_with_passes_overlapping(tmp_path):
    evals, rows = measure(tmp_path, 10, {"num_tasks": 16, "interval": 5}, eval_s=1.0)
    by_stream = defaultdict(list)
    for stream, index in evals.sampled:
        by_stream[stream].append(index)
    versions = {row["eval/m/policy_version"] for row in rows}
    assert {0, 10} <= versions
    assert len(versions) == 3  # a version between that is 5 or, when 5 was skipped, the next that came
    assert by_stream == {f"eval/m@{version}": list(range(16)) for version in sorted(versions)}
    assert set(evals.limits.values()) == {16}
    assert all(row["eval/m/num_episodes"] == 16 for row in rows)
    assert all(row["step"] == row["eval/m/policy_version"] for row in rows)
    assert sorted(evals.closed) == sorted(by_stream)


def test_the_last_measurement_completes_though_training_is_over(tmp_path):
    _, rows = measure(tmp_path, 2, {"num_tasks": 8, "interval": 100}, eval_s=0.5, skip_first_step=True)
    assert [(row["eval/m/policy_version"], row["eval/m/num_episodes"]) for row in rows] == [(2, 8)]


def test_the_group_deadline_drops_no_eval_group(tmp_path):
    """It frees siblings of a train group that would wait for a straggler; a pass is measured whole (R26)."""
    source = {"num_tasks": 4, "interval": 100, "group_size": 2}
    _, rows = measure(
        tmp_path, 2, source, eval_s=0.9, train_s=0.001, group_deadline_s=0.05, skip_first_step=True
    )
    (row,) = rows
    assert (row["eval/m/policy_version"], row["eval/m/num_episodes"]) == (2, 8)
    assert row["eval/m/num_cancelled"] == 0


@pytest.mark.parametrize("fault", ["no answer", "lost answers"])
def test_each_position_has_its_task_though_sampling_fails_now_and_then(tmp_path, fault):
    def prepare(evals: ScriptedEnv) -> None:
        if fault == "no answer":
            evals.sample_errors = 1
        else:  # the stream has moved on all the same
            evals.loses_sample = lambda nth: nth in (3, 5, 9)

    source = {"num_tasks": 6, "interval": 100, "group_size": 2}
    _, rows = measure(tmp_path, 1, source, eval_s=0.01, prepare=prepare)
    assert [(row["eval/m/num_episodes"], row["eval/m/num_errored"]) for row in rows] == [(12, 0), (12, 0)]
    places = defaultdict(list)
    for line in read_lines(tmp_path, "eval"):
        places[line.group.id].append(line.task.data.idx)
    assert places == {f"eval/m@{version}/{at}": [at, at] for version in (0, 1) for at in range(6)}


def test_a_position_whose_task_cannot_be_had_is_errored_and_the_others_have_theirs(tmp_path):
    def prepare(evals: ScriptedEnv) -> None:
        evals.sample_errors = 2  # `retries` is 1

    source = {"num_tasks": 4, "interval": 100, "group_size": 2}
    _, rows = measure(tmp_path, 1, source, eval_s=0.01, prepare=prepare, skip_first_step=True)
    assert [(row["eval/m/num_episodes"], row["eval/m/num_errored"]) for row in rows] == [(8, 2)]
    places = defaultdict(list)
    for line in read_lines(tmp_path, "eval"):
        places[line.group.id].append(line.task.data.idx if line.traces else None)
    assert places == {"eval/m@1/0": [None, None]} | {f"eval/m@1/{at}": [at, at] for at in (1, 2, 3)}


def measured_passes(run: RunDir) -> list[tuple[int, int]]:
    """(version, episodes) of each measurement in the metrics file."""
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "eval/m/policy_version" in row]
    return [(row["eval/m/policy_version"], row["eval/m/num_episodes"]) for row in rows]


def test_a_measurement_that_a_kill_interrupts_goes_on_with_what_is_there(tmp_path):
    """Version 2 is live and half measured when the orchestrator dies; the state of step 2 is older."""
    source = {"name": "m", "env": {"taskset": {"id": "x"}}, "num_tasks": 4, "interval": 2, "group_size": 2}
    block = {"sources": [source]}

    async def first_attempt():
        store = ScriptedStore()
        fine = reply_after(store)

        async def the_fifth_on_hang(call, nth):
            if call.policy_version == 2 and call.task["data"]["idx"] > 1:
                await asyncio.sleep(60)
            return await fine(call, nth)

        config = make_process_config(tmp_path, 4, eval=block, checkpoint_interval=2)
        orchestrator = make_orchestrator(
            config, ScriptedEnv(store, reply_after(store)), {"m": ScriptedEnv(store, the_fifth_on_hang)}
        )
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=2)
        stop = asyncio.Event()

        async def stop_when_half_is_there():
            path = orchestrator.run_dir.traces(2, "eval", "all")
            while not path.exists() or len(path.read_bytes().splitlines()) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()

        stopping = asyncio.create_task(stop_when_half_is_there())
        assert not await run_with_trainer(orchestrator, trainer, stop=stop)
        await stopping
        run = orchestrator.run_dir
        clean_after(run, 2, keep_batches=False)
        return decode_state(read_checkpoint_state(run.checkpoint(2, "orchestrator")), ("script",))

    async def second_attempt(state):
        store = ScriptedStore()
        config = make_process_config(tmp_path, 4, eval=block, start_step=3)
        train, evals = (ScriptedEnv(store, reply_after(store)) for _ in range(2))
        orchestrator = make_orchestrator(config, train, {"m": evals}, state=state)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=3, last=4)
        assert await run_with_trainer(orchestrator, trainer)
        store.assert_clean()
        return evals, orchestrator.run_dir

    evals, run = asyncio.run(second_attempt(asyncio.run(first_attempt())))
    assert measured_passes(run) == [(0, 8), (2, 8), (4, 8)]
    assert [index for stream, index in evals.sampled if stream == "eval/m@2"] == [2, 3]
    lines = read_lines(tmp_path, "eval")
    places = Counter((line.group.id, line.task.data.idx) for line in lines)
    assert places == {(f"eval/m@{v}/{at}", at): 2 for v in (0, 2, 4) for at in range(4)}


def test_the_last_measurement_is_made_up_for_after_everything_else_is_done(tmp_path):
    """Killed between the last checkpoint and the end of the last measurement."""
    source = {"name": "m", "env": {"taskset": {"id": "x"}}, "num_tasks": 4}
    config = make_process_config(tmp_path, 2, eval={"sources": [source]}, start_step=3)
    run = RunDir(config.facts.run_dir)
    assert missing_measurements(config, run) == ["m"]

    async def scenario():
        store = ScriptedStore()
        train, evals = (ScriptedEnv(store, reply_after(store)) for _ in range(2))
        state = make_state(step=2, progress=Progress(step=3), sources=("script",), streams={}, open_tasks=())
        orchestrator = make_orchestrator(config, train, {"m": evals}, state=state)
        assert await orchestrator.run(asyncio.Event())
        orchestrator.parts.monitor.close()
        store.assert_clean()
        assert train.num_runs == 0

    asyncio.run(scenario())
    assert measured_passes(run) == [(2, 4)]
    assert missing_measurements(config, run) == []
