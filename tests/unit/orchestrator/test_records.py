"""Lines of traces.jsonl, the saved state, holdings, the stall report."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from verifiers.v1 import WireTrace
from verifiers.v1.utils.trace_store import read_episodes

from moorage.core.errors import ConfigError, ExchangeError
from moorage.core.rundir import PeerWatch, RunDir, write_end, write_json_atomic
from moorage.orchestrator.connect import check_eval_size, read_addresses, wait_for_addresses
from moorage.orchestrator.episodes import EpisodeLog, effective_copy, render_episode
from moorage.orchestrator.events import failed_episode, is_infra_episode, read_payloads
from moorage.orchestrator.facts import read_reward, read_trace
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.lag import LoopLag
from moorage.orchestrator.outcomes import OutcomeCounts, Outcomes
from moorage.orchestrator.policy import Policy, PolicyWatcher
from moorage.orchestrator.progress import (
    STATE_VERSION,
    OpenTask,
    Progress,
    State,
    Unfinished,
    decode_state,
    encode_state,
)
from moorage.orchestrator.ship import clean_up, load_cost
from moorage.orchestrator.stall import StallReporter
from moorage.payload.custody import CustodyError
from tests.unit.orchestrator.scripted import (
    Says,
    ScriptedEngines,
    ScriptedStore,
    make_episode,
    make_task,
    make_trace,
)
from tests.unit.orchestrator.test_sources import make_source


@pytest.mark.parametrize("branches", [1, 3])
def test_a_line_equals_verifiers_own_record(branches):
    says = [Says(branches=branches), Says(agent="judge", reward=None, ok=False)]
    episode = make_episode(says, make_task(1), ScriptedStore())
    assert json.loads(render_episode(episode)) == json.loads(json.dumps(episode.to_record()))


@pytest.mark.parametrize("branches", [1, 4])
def test_token_counts_are_verifiers_own(branches):
    trace = make_trace(Says(branches=branches), make_task(1), None)
    facts = read_trace(trace)
    counts = (facts.input_tokens, facts.output_tokens, facts.total_tokens, facts.turns, facts.branches)
    expected = (trace.num_input_tokens, trace.num_output_tokens, trace.num_total_tokens, trace.num_turns)
    assert counts == (*expected, trace.num_branches)


def test_lines_are_appended_in_order_and_read_by_verifiers(tmp_path):
    async def scenario():
        log = EpisodeLog(RunDir(tmp_path))
        episode = make_episode([Says()], make_task(1), ScriptedStore())
        log.add(1, "train", "all", episode)
        log.add(1, "train", "all", failed_episode(make_task(2), "e", "worker_died", "gone"))
        await log.flush()
        log.add(1, "train", "effective", effective_copy(episode, {episode.traces[0].id: 0.25}))
        await log.close()

    asyncio.run(scenario())
    whole = read_episodes(tmp_path / "episodes/step_1/train/all", WireTrace)
    assert [len(each.traces) for each in whole] == [1, 0]
    assert whole[1].errors[0].type == "worker_died"
    (effective,) = read_episodes(tmp_path / "episodes/step_1/train/effective", WireTrace)
    assert effective.traces[0].info["advantage"] == 0.25


def test_an_effective_copy_holds_shipped_traces_only_and_tells_unassigned_from_zero():
    episode = make_episode([Says(), Says(agent="b"), Says(agent="c")], make_task(1), ScriptedStore())
    first, second, _ = episode.traces
    copy = effective_copy(episode, {first.id: 0.0, second.id: None})
    assert [trace.id for trace in copy.traces] == [first.id, second.id]
    assert copy.traces[0].info["advantage"] == 0.0
    assert "advantage" not in copy.traces[1].info
    assert "advantage" not in first.info


def test_zero_is_a_reward_and_a_missing_part_is_none():
    assert read_reward(make_trace(Says(reward=0.0), make_task(0), None)) == 0.0
    assert read_reward(make_trace(Says(reward=None), make_task(0), None)) is None
    assert read_reward(make_trace(Says(reward=float("inf")), make_task(0), None)) is None


@pytest.mark.parametrize(
    ("kind", "infra"),
    [("worker_died", True), ("unreachable", True), ("task_error", False), ("deadline", False)],
)
def test_kinds_of_errors_are_told_apart(kind, infra):
    assert is_infra_episode(failed_episode(make_task(0), "e", kind, "x")) is infra


def test_a_lost_sandbox_is_infrastructure_and_a_failed_task_is_not():
    assert is_infra_episode(make_episode([Says(ok=False, error="SandboxError")], make_task(0), None))
    assert not is_infra_episode(make_episode([Says(ok=False, error="TaskError")], make_task(0), None))
    assert not is_infra_episode(make_episode([Says()], make_task(0), None))


def make_state(**more) -> State:
    defaults = {
        "version": STATE_VERSION,
        "step": 4,
        "progress": Progress(step=5),
        "counts": OutcomeCounts(started=3),
        "sources": ("a", "b"),
        "num_picked": 7,
        "streams": {"train/a": (1, 2)},
        "open_tasks": (OpenTask("a", make_task(1)),),
        "algorithms": {"a": None},
    }
    return State(**{**defaults, **more})


def test_a_state_is_read_as_written():
    state = make_state()
    assert decode_state(encode_state(state), ("b", "a")) == state


def test_a_state_of_other_sources_or_of_another_form_is_refused():
    with pytest.raises(ConfigError, match="same train sources"):
        decode_state(encode_state(make_state()), ("a",))
    with pytest.raises(ExchangeError, match="form 9"):
        decode_state(encode_state(make_state(version=9)), ("a", "b"))
    with pytest.raises(ExchangeError, match="cannot be read"):
        decode_state(b"\xc1", ("a", "b"))


def test_what_an_attempt_lost_is_cancelled_after_a_resume():
    counts = OutcomeCounts(started=10, trained=4, errored=1)
    counts.dropped["stale"] = 2
    assert Outcomes(counts).counts.cancelled == 3


def test_an_unfinished_task_is_settled_once():
    unfinished = Unfinished()
    unfinished.open("g", "a", make_task(1))
    unfinished.settle("g")
    unfinished.settle("g")
    assert unfinished.tasks == ()


def test_holdings_release_once_and_the_rest_at_the_end():
    async def scenario():
        store = ScriptedStore()
        holdings = Holdings(store)
        sending = asyncio.create_task(holdings.run())
        payloads = [read_payloads(make_episode([Says(branches=2)], make_task(i), store)) for i in range(3)]
        for each in payloads:
            holdings.hold(each, "dispatcher")
        holdings.hand_over(payloads[0], "dispatcher", "train_sink")
        with pytest.raises(CustodyError):
            holdings.hold(payloads[0], "train_sink")
        blob_ids = [branch.id for branch in next(iter(payloads[0].values())).branches]
        holdings.release_ids(blob_ids[:1], "train_sink")
        holdings.ship(blob_ids[1:], "train_sink")
        holdings.release(payloads[1], "dispatcher")
        holdings.release(payloads[1], "dispatcher")  # nothing is left of it
        assert holdings.num_outstanding == 2
        await asyncio.sleep(0)
        sending.cancel()  # in the middle of a send
        await asyncio.gather(sending, return_exceptions=True)
        await holdings.close()
        store.release(next(iter(payloads[0].values())).branches[1:], "trainer")
        store.assert_clean()
        freed = store.ledger.freed
        assert (freed["train_sink"], freed["dispatcher"], freed["shutdown"], freed["trainer"]) == (1, 2, 2, 1)

    asyncio.run(scenario())


def test_the_stall_report_says_who_waits_for_what():
    async def scenario():
        reporter = StallReporter(
            lambda: {"ship": "the trainer: policy version 3", "consume": ""}, report_s=0.1
        )
        task = asyncio.create_task(reporter.run())
        await asyncio.sleep(0.35)
        task.cancel()
        return reporter

    reporter = asyncio.run(scenario())
    assert reporter.num_reports >= 1
    assert "ship waits for the trainer: policy version 3" in reporter.describe()
    assert "consume" not in reporter.describe()


def test_loop_lag_sees_a_blocked_loop():
    async def scenario():
        lag = LoopLag()
        task = asyncio.create_task(lag.run())
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # noqa: ASYNC251 - blocking the loop is what this is about
        await asyncio.sleep(0.05)
        task.cancel()
        return lag.take()

    assert asyncio.run(scenario())["event_loop_lag/max"] > 0.2
    assert LoopLag().take()["event_loop_lag/n"] == 0


def test_addresses_are_those_of_the_source_only(tmp_path):
    run = RunDir(tmp_path)
    for store in ("math.n1", "math.n2", "math.hard.n1"):
        write_json_atomic(run.address("train", store), {"store": store, "rpc": f"tcp://{store}"})
    assert read_addresses(run, make_source("math")) == {
        "math.n1": "tcp://math.n1",
        "math.n2": "tcp://math.n2",
    }


def test_a_wait_for_addresses_ends_with_the_run(tmp_path):
    run = RunDir(tmp_path)
    write_end(run, "failed", "env server: boom")
    with pytest.raises(Exception, match="boom"):
        asyncio.run(wait_for_addresses(run, make_source("math"), 1, PeerWatch(run, "trainer")))


def test_an_infinite_eval_needs_a_number():
    class Endless:
        num_tasks = None

    with pytest.raises(ConfigError, match="num_tasks"):
        check_eval_size(make_source("m"), Endless())


def test_old_weights_go_once_a_newer_version_is_live_unless_a_checkpoint_names_them(tmp_path):
    run = RunDir(tmp_path)
    for version in range(5):
        run.weight(version).mkdir(parents=True)
        (run.weight(version) / "READY").touch()
    run.checkpoint(2, "orchestrator").mkdir(parents=True)
    clean_up(run, 4, retain_batches=False)
    assert sorted(path.name for path in run.weights.iterdir()) == ["step_2", "step_4"]


def test_an_unreadable_model_counts_tokens(tmp_path):
    assert load_cost(str(tmp_path))(7) == 7


def test_the_watcher_skips_versions_and_cancels_before_the_pause(tmp_path):
    async def scenario():
        run, engines, live = RunDir(tmp_path), ScriptedEngines(), []
        for version in (0, 1, 3):
            run.weight(version).mkdir(parents=True)
            (run.weight(version) / "READY").touch()

        async def before_pause():
            engines.calls.append(("cancel", None))

        policy = Policy("policy", 0)
        watcher = PolicyWatcher(
            run,
            policy,
            engines,
            last_version=3,
            watch=PeerWatch(run, "trainer"),
            before_pause=before_pause,
            on_live=live.append,
        )
        waiting = asyncio.create_task(watcher.wait_live(2))
        await watcher.run()
        await waiting
        assert engines.calls == [("cancel", None), ("pause", 3), ("resume", 3)]
        assert (policy.version, live, watcher.num_updates) == (3, [3], 1)

    asyncio.run(scenario())


def test_the_watcher_ends_with_the_trainer(tmp_path):
    async def scenario():
        run = RunDir(tmp_path)
        write_end(run, "failed", "trainer: boom")
        watcher = PolicyWatcher(
            run,
            Policy("policy", 0),
            ScriptedEngines(),
            last_version=3,
            watch=PeerWatch(run, "trainer"),
            before_pause=lambda: asyncio.sleep(0),
            on_live=lambda _: None,
        )
        async with asyncio.timeout(10):
            await watcher.run()

    with pytest.raises(Exception, match="boom"):
        asyncio.run(scenario())
