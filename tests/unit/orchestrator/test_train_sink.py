from __future__ import annotations

import asyncio

import pytest

from moorage.config.orchestrator import DropConfig
from moorage.core.errors import ConfigError
from moorage.orchestrator.events import Arrived
from moorage.orchestrator.progress import Progress
from moorage.orchestrator.step_metrics import advance, step_metrics, window_sizes
from moorage.records.sample import Span
from tests.unit.orchestrator.scripted import Says, make_episode, make_task
from tests.unit.orchestrator.sinking import Bench


def test_a_batch_is_cut_from_whole_groups_in_order_of_completion():
    async def scenario():
        bench = Bench()
        early, late = bench.group(), bench.group()
        await bench.arrive(early, Says(reward=1.0))
        await bench.arrive(late, Says(reward=1.0))
        await bench.arrive(late, Says(reward=0.0))
        assert not bench.sink.is_ready
        await bench.arrive(early, Says(reward=0.0))
        batch = bench.sink.cut(1)
        assert [scored.arrived.group.id for scored in batch.cohort] == [late.id] * 2 + [early.id] * 2
        assert [scored.advantage for scored in batch.cohort] == [0.5, -0.5, 0.5, -0.5]
        assert batch.samples[0].spans == (Span(4, 10, 0.5),)
        assert bench.settled == [late.id, late.id, late.id, early.id, early.id, early.id]
        bench.train(batch)
        assert bench.outcomes.counts.trained == 4
        await bench.end()

    asyncio.run(scenario())


def test_overflow_stays_queued_and_ships_next():
    async def scenario():
        bench = Bench(batch_traces=3)
        await bench.whole([1.0, 0.0])
        await bench.whole([1.0, 0.0])
        first = bench.sink.cut(1)
        bench.train(first)
        assert len(first.cohort) == 3
        assert bench.sink.num_waiting == 1
        assert bench.sink.cut(2) is None
        await bench.whole([1.0, 0.0])
        second = bench.sink.cut(2)
        bench.train(second)
        assert len(second.cohort) == 3
        await bench.end()

    asyncio.run(scenario())


def test_a_batch_by_tokens_is_cut_at_the_sum_of_sample_lengths():
    async def scenario():
        bench = Bench(batch_traces=None, batch_tokens=25)
        await bench.whole([1.0, 0.0])
        assert not bench.sink.is_ready
        assert bench.sink.batches_waiting() == pytest.approx(20 / 100)
        await bench.whole([1.0, 0.0])
        batch = bench.sink.cut(1)
        assert len(batch.samples) == 3
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_a_stale_cancellation_voids_the_whole_group():
    async def scenario():
        bench = Bench(group_size=4)
        group = bench.group()
        await bench.arrive(group, Says())
        await bench.arrive(group, Says(reward=0.0))
        await bench.cancel(group, 2, "stale", num_started=1)
        assert bench.sink.num_waiting == 0
        assert bench.outcomes.counts.dropped["stale"] == 2
        assert bench.outcomes.counts.cancelled == 1
        assert bench.settled == [group.id]
        assert bench.holdings.released["train_sink"] == 2
        await bench.end()

    asyncio.run(scenario())


def test_an_overload_cancellation_scores_what_has_arrived():
    async def scenario():
        bench = Bench(group_size=4)
        group = bench.group()
        await bench.arrive(group, Says(reward=1.0))
        await bench.arrive(group, Says(reward=0.0))
        await bench.cancel(group, 2, "overload")
        assert bench.sink.num_waiting == 2
        assert not bench.settled
        await bench.end()

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["stale", "overload", "deadline"])
def test_a_group_cancelled_before_any_episode_leaves_nothing(reason):
    async def scenario():
        bench = Bench(group_size=3)
        group = bench.group()
        await bench.cancel(group, 3, reason)
        assert bench.sink.num_pending == bench.sink.num_waiting == 0
        assert bench.settled == [group.id]
        assert [facts.cancelled for facts in bench.sink.window.episodes] == [True] * 3
        await bench.end()

    asyncio.run(scenario())


def test_a_cancellation_may_arrive_before_the_episodes():
    async def scenario():
        bench = Bench(group_size=3)
        group = bench.group()
        await bench.cancel(group, 1, "overload")
        await bench.arrive(group, Says(reward=1.0))
        await bench.arrive(group, Says(reward=0.0))
        assert bench.sink.num_waiting == 2
        await bench.end()

    asyncio.run(scenario())


def test_errored_members_have_no_share_in_the_baseline():
    async def scenario():
        bench = Bench(group_size=4, batch_traces=2)
        group = bench.group()
        await bench.arrive(group, Says(reward=1.0))
        await bench.fail(group)
        await bench.arrive(group, Says(reward=9.0), Says(agent="judge", ok=False))
        await bench.arrive(group, Says(reward=0.0))
        batch = bench.sink.cut(1)
        assert [scored.advantage for scored in batch.cohort] == [0.5, -0.5]
        assert bench.outcomes.counts.errored == 2
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_a_clean_trace_of_a_failed_episode_never_trains():
    async def scenario():
        bench = Bench(group_size=1, batch_traces=1)
        await bench.arrive(bench.group(), Says(reward=1.0), ok=False)
        assert bench.sink.num_waiting == 0
        await bench.end()

    asyncio.run(scenario())


def test_rewards_that_are_missing_or_no_number_are_unscored_and_zero_is_a_reward():
    async def scenario():
        bench = Bench(group_size=6, batch_traces=4)
        group = bench.group()
        for reward in (0.0, None, float("nan"), -0.0, 1, False):
            await bench.arrive(group, Says(reward=reward))
        batch = bench.sink.cut(1)
        assert [scored.advantage for scored in batch.cohort] == [-0.25, -0.25, 0.75, -0.25]
        assert bench.outcomes.counts.dropped["unscored"] == 2
        assert bench.holdings.released["train_sink"] == 2
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_uneven_groups_are_told_apart_by_id_only():
    async def scenario():
        bench = Bench(batch_traces=11, drop=DropConfig(zero_advantage=False))
        groups = [bench.group(size=4), bench.group("code", size=3), bench.group(size=4)]
        plans = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 1.0]]
        for at in range(4):  # interleaved
            for group, rewards in zip(groups, plans, strict=True):
                if at < len(rewards):
                    await bench.arrive(group, Says(reward=rewards[at]))
        batch = bench.sink.cut(1)
        by_group = {group.id: [] for group in groups}
        for scored in batch.cohort:
            by_group[scored.arrived.group.id].append(scored.advantage)
        assert by_group[groups[0].id] == [0.5, -0.5, -0.5, 0.5]
        assert by_group[groups[1].id] == [0.0] * 3
        assert by_group[groups[2].id] == [-0.25] * 3 + [0.75]
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_zero_credit_is_pruned_after_selection_so_a_batch_may_be_short():
    async def scenario():
        bench = Bench()
        await bench.whole([1.0, 1.0])
        await bench.whole([1.0, 0.0])
        batch = bench.sink.cut(1)
        assert len(batch.cohort) == 2
        assert bench.outcomes.counts.dropped["zero_advantage"] == 2
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_a_batch_of_nothing_but_zero_credit_keeps_the_window_and_ten_in_a_row_raise():
    async def scenario():
        bench = Bench()
        for _ in range(9):
            await bench.whole([1.0, 1.0])
            await bench.whole([0.0, 0.0])
            assert bench.sink.cut(1) is None
        assert len(bench.sink.window.episodes) == 36
        await bench.whole([1.0, 1.0])
        await bench.whole([0.0, 0.0])
        with pytest.raises(ConfigError, match="zero credit only"):
            bench.sink.cut(1)
        await bench.end()

    asyncio.run(scenario())


def test_every_reason_is_collected_and_only_configured_ones_drop():
    async def scenario():
        bench = Bench(drop=DropConfig(repetition=True))
        await bench.whole([1.0, 1.0], detected={"gibberish": True, "repetition": True})
        assert bench.sink.window.decisions == [frozenset({"gibberish", "repetition", "zero_advantage"})] * 2
        assert bench.sink.num_waiting == 0
        assert bench.outcomes.counts.dropped["repetition"] == 2
        await bench.whole([1.0, 0.0], detected={"gibberish": True, "repetition": False})
        assert bench.sink.num_waiting == 2
        await bench.end()

    asyncio.run(scenario())


def test_the_sweep_voids_queued_traces_whose_oldest_token_is_too_old():
    async def scenario():
        bench = Bench(max_off_policy=2)
        await bench.whole([1.0, 0.0], versions=(0, 3))
        await bench.whole([1.0, 0.0], versions=(1, 3))
        await bench.whole([1.0, 0.0], versions=(2, 3))
        batch = bench.sink.cut(4)
        assert {scored.oldest for scored in batch.cohort} == {1, 2}
        assert batch.window.num_stale == 2
        assert bench.outcomes.counts.dropped["stale"] == 2
        bench.train(batch)
        assert bench.sink.cut(5) is None
        await bench.end()

    asyncio.run(scenario())


def test_without_labels_the_version_at_dispatch_counts():
    async def scenario():
        bench = Bench(max_off_policy=0, batch_traces=1)
        group = bench.group(version=3)
        await bench.arrive(group, Says(reward=1.0, versions=None))
        await bench.arrive(group, Says(reward=0.0, versions=None))
        assert bench.sink.sweep(4) == 0
        assert bench.sink.sweep(5) == 2
        await bench.end()

    asyncio.run(scenario())


def test_traces_of_untrained_agents_free_their_payloads_and_a_two_agent_episode_trains_once():
    async def scenario():
        bench = Bench(batch_traces=2)
        group = bench.group()
        for reward in (1.0, 0.0):
            await bench.arrive(group, Says(reward=reward), Says(agent="user", trainable=False, reward=0.5))
        batch = bench.sink.cut(1)
        assert {scored.trace.agent.name for scored in batch.cohort} == {"agent"}
        bench.train(batch)
        assert bench.outcomes.counts.trained == 2
        await bench.end()

    asyncio.run(scenario())


def test_an_episode_of_two_trained_traces_in_two_batches_counts_once():
    async def scenario():
        bench = Bench(batch_traces=3)
        group = bench.group()
        for reward in (1.0, 0.0):
            await bench.arrive(group, Says(reward=reward, agent="a"), Says(reward=1 - reward, agent="b"))
        first = bench.sink.cut(1)
        bench.train(first)
        assert bench.outcomes.counts.trained == 1
        assert bench.outcomes.waiting == 1
        await bench.whole([1.0, 0.0])
        second = bench.sink.cut(2)
        bench.train(second)
        assert bench.outcomes.counts.trained == 2 + 2
        await bench.end()

    asyncio.run(scenario())


def test_a_trace_cut_to_nothing_is_dropped_as_truncated():
    async def scenario():
        bench = Bench(seq_len=4)
        await bench.whole([1.0, 0.0])
        assert bench.outcomes.counts.dropped["truncated"] == 2
        await bench.end()

    asyncio.run(scenario())


def test_branches_that_train_nothing_are_freed_while_their_siblings_wait():
    async def scenario():
        bench = Bench(batch_traces=2)
        group = bench.group()
        event = await bench.arrive(group, Says(reward=1.0, branches=2))
        await bench.arrive(group, Says(reward=0.0, branches=2))
        batch = bench.sink.cut(1)
        assert len(batch.samples) == 4
        assert len(event.episode.traces) == 1
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())


def test_an_env_server_that_is_not_ours_is_refused_at_the_first_ok_episode():
    async def scenario():
        bench = Bench()
        group = bench.group()
        episode = make_episode([Says()], make_task(0), None)
        bench.outcomes.start(1)
        with pytest.raises(ConfigError, match="not moorage's"):
            await bench.sink.add(Arrived(group, episode, {episode.traces[0].id: None}))

    asyncio.run(scenario())


def test_missing_routing_rows_stop_a_run_that_replays_them():
    async def scenario():
        bench = Bench(require_routing=True)
        await bench.whole([1.0, 0.0], routing=(2, 2))
        with pytest.raises(ConfigError, match=r"inference\.routed_experts"):
            await bench.whole([1.0, 0.0])

    asyncio.run(scenario())


def test_truncated_samples_without_their_kept_sets_stop_the_run():
    async def scenario():
        bench = Bench(truncated=True)
        await bench.whole([1.0, 0.0], kept_sets=True)
        with pytest.raises(ConfigError, match=r"came without kept sets.*inference\.sampling_mask = true"):
            await bench.whole([1.0, 0.0])

    asyncio.run(scenario())


def test_a_run_that_produces_nothing_raises_with_the_last_error():
    async def scenario():
        bench = Bench(group_size=4)

        async def fail_group():
            group = bench.group()
            for _ in range(4):
                await bench.fail(group)

        for _ in range(9):
            await fail_group()
        with pytest.raises(ConfigError, match="task_error: no"):
            await fail_group()
        await bench.end()

    asyncio.run(scenario())


def test_shutdown_frees_what_is_pending_queued_and_held():
    async def scenario():
        bench = Bench(group_size=3)
        await bench.whole([1.0, 0.0])
        await bench.arrive(bench.group(), Says())
        await bench.end()
        assert bench.outcomes.counts.dropped["shutdown"] == 3
        assert bench.store.ledger.freed["shutdown"] == 3

    asyncio.run(scenario())


def test_a_group_is_in_one_window_whole_though_a_batch_ships_while_it_is_open():
    async def scenario():
        bench = Bench()
        progress = Progress()
        open_group = bench.group()
        await bench.arrive(open_group, Says(reward=1.0))
        for _ in range(2):
            await bench.whole([1.0, 0.0])
        first = bench.sink.cut(1)
        advance(progress, window_sizes(first.window))
        bench.train(first)
        await bench.arrive(open_group, Says(reward=0.0))
        await bench.whole([1.0, 0.0])
        second = bench.sink.cut(2)
        advance(progress, window_sizes(second.window))
        bench.train(second)
        rows = [
            step_metrics(batch, window_sizes(batch.window), progress, ["math"]) for batch in (first, second)
        ]
        assert [open_group.id in {each.group_id for each in b.window.episodes} for b in (first, second)] == [
            False,
            True,
        ]
        for row in rows:
            assert row["train/math/all/agent/solved_some"] == 1.0
            assert row["train/math/all/agent/is_trainable/mean"] == 1.0
            assert row["train/math/all/agent/is_admitted/mean"] == 1.0
        assert [row["reward/mean"] for row in rows] == [0.6, 1 / 3], "of what arrived meanwhile"
        assert (progress.total_rollouts, progress.total_tasks) == (8, 4)
        await bench.end()

    asyncio.run(scenario())


def test_what_waits_for_a_later_batch_counts_as_admitted_when_it_is_decided():
    async def scenario():
        bench = Bench(batch_traces=3)
        await bench.whole([1.0, 0.0])
        await bench.whole([1.0, 0.0])
        await bench.whole([1.0, 1.0])
        batch = bench.sink.cut(1)
        row = step_metrics(batch, window_sizes(batch.window), Progress(), ["math"])
        assert row["train/math/all/agent/is_admitted/mean"] == 4 / 6
        bench.train(batch)
        await bench.end()

    asyncio.run(scenario())
