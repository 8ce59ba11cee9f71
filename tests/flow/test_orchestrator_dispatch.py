# ruff: noqa: ARG001, ARG005 - scripted partners take what the real ones take
"""Endings that are not ok, through dispatcher, sinks and files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from verifiers.v1 import WireEpisode, WireTrace
from verifiers.v1.utils.trace_store import read_episodes

from moorage.core.errors import ConfigError, EnvServerError
from moorage.core.rundir import ready_steps
from moorage.exchange.batches import read_batch
from moorage.monitor.files import read_metrics
from moorage.records.sample import owned_slices
from tests.flow.test_orchestrator_run import (
    assert_accounts,
    make_orchestrator,
    make_process_config,
    run_with_trainer,
)
from tests.unit.orchestrator.scripted import (
    Says,
    ScriptedEngines,
    ScriptedEnv,
    ScriptedStore,
    ScriptedTrainer,
    make_episode,
    reply_after,
)


def read_lines(root: Path, split: str = "train", subset: str = "all") -> list[WireEpisode]:
    """Every line of every step, with verifiers' own reader."""
    folders = sorted((root / "run" / "episodes").glob(f"step_*/{split}/{subset}"))
    return [episode for folder in folders for episode in read_episodes(folder, WireTrace)]


def run_steps(root: Path, behave, steps: int = 2, step_s: float = 0.0, **settings):
    """A run with a scripted trainer; `behave(store)` makes the environment's behaviour."""

    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, behave(store))
        orchestrator = make_orchestrator(make_process_config(root, steps, **settings), env)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=steps, step_s=step_s)
        assert await run_with_trainer(orchestrator, trainer, 60)
        store.assert_clean()
        assert_accounts(orchestrator)
        return orchestrator, env, trainer

    return asyncio.run(scenario())


def test_infrastructure_failures_are_retried_and_never_reach_the_agent(tmp_path):
    def behave(store):
        fine = reply_after(store)

        async def every_fifth_dies(call, nth):
            if nth % 5 == 0:
                raise EnvServerError("worker_died", "scripted")
            return await fine(call, nth)

        return every_fifth_dies

    orchestrator, _, _ = run_steps(tmp_path, behave)
    counts = orchestrator.outcomes.counts
    assert counts.retried > 0
    rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))[:2]
    assert all(row["train/script/all/agent/has_error/mean"] == 0 for row in rows)
    assert sum(row["dispatcher/retried/train"] for row in rows) > 0


def test_task_errors_are_final_traceless_and_have_a_line(tmp_path):
    def behave(store):
        fine = reply_after(store)

        async def every_fifth_raises(call, nth):
            if nth % 5 == 0:
                raise EnvServerError("task_error", "scripted: the task raised")
            return await fine(call, nth)

        return every_fifth_raises

    orchestrator, env, _ = run_steps(tmp_path, behave)
    counts = orchestrator.outcomes.counts
    assert counts.retried == 0
    assert counts.errored > 0
    traceless = [
        each for each in read_lines(tmp_path) if not each.traces and each.errors[0].type == "task_error"
    ]
    assert len(traceless) == counts.errored
    assert all(not each.ok and each.group is not None and each.run is not None for each in traceless)
    rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))[:2]
    assert all(row["train/script/all/agent/has_error/mean"] == 0 for row in rows)
    assert sum(row["dispatcher/errored/train/script"] for row in rows) > 0
    assert sum(row["train/script/all/has_error/mean"] for row in rows) > 0
    assert env.num_runs == counts.started


def test_a_failed_trace_shows_under_its_agent_and_is_not_trained(tmp_path):
    def behave(store):
        async def every_fourth_fails(call, nth):
            says = Says(reward=float(nth % 2), ok=bool(nth % 4))
            return make_episode([says], call.task, store)

        return every_fourth_fails

    orchestrator, _, trainer = run_steps(tmp_path, behave)
    rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))[:2]
    assert any(row["train/script/all/agent/error/TaskError"] > 0 for row in rows)
    shipped = {trace_id for _, trace_id in trainer.trained}
    failed = {trace.id for each in read_lines(tmp_path) for trace in each.traces if not trace.ok}
    assert failed
    assert not failed & shipped


def test_an_ok_episode_without_traces_or_turns_is_an_error(tmp_path):
    def behave(store):
        fine = reply_after(store)

        async def some_are_empty(call, nth):
            episode = await fine(call, nth)
            if nth % 6 == 0:
                store.release([_ref(episode)], "env_server")
                episode.traces = []
            elif nth % 7 == 0:
                store.release([_ref(episode)], "env_server")
                episode.traces[0].nodes = episode.traces[0].nodes[:1]
                episode.traces[0].info["moorage_payload"]["branches"] = []
            return episode

        return some_are_empty

    orchestrator, _, _ = run_steps(tmp_path, behave)
    kinds = {each.errors[-1].type for each in read_lines(tmp_path) if each.errors}
    assert {"EmptyEpisode", "EmptyTrajectory"} <= kinds
    assert orchestrator.outcomes.counts.errored > 0


def _ref(episode: WireEpisode):
    from moorage.orchestrator.events import read_payloads
    from moorage.orchestrator.payloads import payload_refs

    return payload_refs(next(iter(read_payloads(episode).values())))[0]


def test_an_episode_that_answers_for_another_task_ends_the_run(tmp_path):
    def behave(store):
        async def wrong(call, nth):
            return make_episode([Says()], {**call.task, "hash": "other"}, store)

        return wrong

    with pytest.raises(EnvServerError, match="answers for 'other'"):
        run_steps(tmp_path, behave)


def test_an_environment_that_scores_groups_runs_them_whole(tmp_path):
    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store, lambda rng: rng.random() * 0.01))
        orchestrator = make_orchestrator(make_process_config(tmp_path, 2), env, scores_groups=True)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=2)
        assert await run_with_trainer(orchestrator, trainer)
        store.assert_clean()
        assert_accounts(orchestrator)
        assert env.peak_in_flight <= 32
        assert env.num_runs * 4 == orchestrator.outcomes.counts.started

    asyncio.run(scenario())


def test_stale_groups_are_cancelled_before_the_pause_and_late_episodes_freed(tmp_path):
    """Some runs outlive many versions; one in three ignores its cancellation and comes back with payloads."""

    def behave(store):
        fine = reply_after(store)

        async def some_are_slow(call, nth):
            if nth % 12 == 0:
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    if nth % 36:
                        raise
            return await fine(call, nth)

        return some_are_slow

    orchestrator, _, _ = run_steps(tmp_path, behave, steps=8, max_off_policy_steps=1)
    rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))
    assert sum(row.get("dispatcher/cancelled/train", 0) for row in rows) > 0
    assert orchestrator.outcomes.counts.cancelled > 0
    assert all(row["off_policy/max"] <= 1 for row in rows if "off_policy/max" in row)
    cancelled = [each for each in read_lines(tmp_path) if each.errors and each.errors[0].type == "cancelled"]
    assert cancelled
    assert all(not each.traces and not each.ok for each in cancelled)
    assert all(not name.startswith("train/script/all/agent/cancelled") for row in rows for name in row)


def test_a_group_is_dropped_at_its_deadline_however_busy_the_dispatcher_is(tmp_path):
    """Something happens all the time, so the dispatcher never waits to the end of its half second."""
    hung_s = []

    def behave(store):
        fine = reply_after(store, lambda rng: 0.001)

        async def the_second_hangs(call, nth):
            if nth == 2:
                begun = time.monotonic()
                try:
                    await asyncio.sleep(60)
                finally:
                    hung_s.append(time.monotonic() - begun)
            return await fine(call, nth)

        return the_second_hangs

    begun = time.monotonic()
    run_steps(tmp_path, behave, steps=50, step_s=0.08, group_deadline_s=0.5, max_off_policy_steps=99)
    assert time.monotonic() - begun > 4
    assert 0.4 < hung_s[0] < 2.5


def test_a_group_past_its_deadline_is_scored_with_what_has_arrived(tmp_path):
    def behave(store):
        fine = reply_after(store)

        async def every_fourth_hangs(call, nth):
            if nth % 4 == 0:
                await asyncio.sleep(60)
            return await fine(call, nth)

        return every_fourth_hangs

    orchestrator, _, trainer = run_steps(tmp_path, behave, steps=1, group_deadline_s=0.5)
    assert trainer.trained
    assert orchestrator.outcomes.counts.cancelled > 0


def test_an_eval_group_that_fails_whole_counts_and_frees(tmp_path):
    async def scenario():
        store = ScriptedStore()
        fine = reply_after(store)

        async def task_two_fails(call, nth):
            if call.task["data"]["idx"] == 2:
                raise EnvServerError("task_error", "scripted")
            return await fine(call, nth)

        source = {"name": "m", "env": {"taskset": {"id": "x"}}, "num_tasks": 4}
        config = make_process_config(tmp_path, 1, eval={"sources": [source], "group_size": 3})
        env, evals = ScriptedEnv(store, fine), ScriptedEnv(store, task_two_fails)
        orchestrator = make_orchestrator(config, env, {"m": evals})
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=1)
        assert await run_with_trainer(orchestrator, trainer)
        store.assert_clean()
        return read_metrics(orchestrator.run_dir.metrics("orchestrator"))

    rows = [row for row in asyncio.run(scenario()) if "eval/m/num_episodes" in row]
    assert [row["eval/m/policy_version"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["eval/m/num_episodes"], row["eval/m/num_errored"], row["eval/m/num_scored"]) == (12, 3, 9)
        assert row["eval/m/all/has_error/mean"] == 0.25
        assert row["eval/m/all/agent/has_error/mean"] == 0
    lines = read_lines(tmp_path, "eval")
    assert len(lines) == 24
    assert sum(not each.traces for each in lines) == 6


def test_a_server_that_gives_no_tasks_ends_the_run_with_its_name(tmp_path):
    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store))
        env.sample_errors = 100
        orchestrator = make_orchestrator(make_process_config(tmp_path, 1), env)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=1)
        orchestrator.dispatcher.limits.sample_retry_s = 0.01
        with pytest.raises(EnvServerError, match="`script` gave no task 10 times"):
            await run_with_trainer(orchestrator, trainer)

    asyncio.run(scenario())


def test_a_run_where_every_episode_fails_ends_with_the_error(tmp_path):
    def behave(store):
        async def raises(call, nth):
            raise EnvServerError("task_error", "scripted: always")

        return raises

    with pytest.raises(ConfigError, match="scripted: always"):
        run_steps(tmp_path, behave)


def test_sigterm_cancels_runs_and_releases_everything(tmp_path):
    async def scenario():
        store = ScriptedStore()
        behave = reply_after(store, lambda rng: rng.random() * 0.2)
        env = ScriptedEnv(store, behave)
        orchestrator = make_orchestrator(make_process_config(tmp_path, 1000), env)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=1000)
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        assert not await run_with_trainer(orchestrator, trainer, stop=stop)
        for step in ready_steps(orchestrator.run_dir.batches):  # READY: the trainer's to free
            batch = read_batch(orchestrator.run_dir, step, 0)
            owned = owned_slices(batch.micro_batches)
            store.release([each for each in owned if each.id not in store.freed_by], "trainer")
        store.assert_clean()
        assert_accounts(orchestrator)
        assert env.in_flight == 0
        assert orchestrator.parts.engines.load == 0

    asyncio.run(scenario())


def test_buffers_are_bounded_when_the_trainer_is_slow(tmp_path):
    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store))
        orchestrator = make_orchestrator(make_process_config(tmp_path, 3, max_ahead=8), env)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=3, step_s=0.4)
        peak = 0

        async def look():
            nonlocal peak
            while True:
                peak = max(peak, orchestrator.outcomes.waiting + orchestrator.outcomes.in_flight)
                await asyncio.sleep(0.002)

        looking = asyncio.create_task(look())
        assert await run_with_trainer(orchestrator, trainer)
        looking.cancel()
        store.assert_clean()
        return peak

    assert asyncio.run(scenario()) <= 4 * 16 + 2 * 32


def test_engines_see_no_more_than_the_cap_and_updates_in_order(tmp_path):
    async def scenario():
        store, engines = ScriptedStore(), ScriptedEngines()
        env = ScriptedEnv(store, reply_after(store, lambda rng: 0.005))
        orchestrator = make_orchestrator(make_process_config(tmp_path, 4), env, engines=engines)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=4)
        assert await run_with_trainer(orchestrator, trainer)
        return engines

    engines = asyncio.run(scenario())
    assert engines.peak <= 32
    versions = [version for what, version in engines.calls if what == "pause"]
    assert versions == sorted(set(versions))
    assert versions[-1] == 4
