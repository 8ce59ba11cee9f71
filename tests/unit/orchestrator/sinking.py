"""A train sink fed by hand: groups, their episodes, their cancellations, without a dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from moorage.config.orchestrator import DropConfig
from moorage.orchestrator.algorithms.grpo import Grpo
from moorage.orchestrator.events import Arrived, Cancelled, failed_episode, read_payloads
from moorage.orchestrator.groups import Cancellation, Group, Reason
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.sink_records import SinkLimits, TrainSettings
from moorage.orchestrator.train_sink import TrainSink
from tests.unit.orchestrator.scripted import Says, ScriptedStore, make_episode, make_task
from tests.unit.orchestrator.test_groups import make_group


class Bench:
    """The sink and its surroundings. Use inside a running loop."""

    def __init__(
        self, *, group_size: int = 2, algorithm: Any = None, truncated: bool = False, **limits: Any
    ) -> None:
        self.store = ScriptedStore()
        self.holdings = Holdings(self.store)
        self.outcomes = Outcomes()
        self.settled: list[str] = []
        self.group_size = group_size
        defaults = {"seq_len": 64, "max_off_policy": 8, "batch_traces": 4, "drop": DropConfig()}
        settings = TrainSettings(algorithm or Grpo(), 1.0, group_size, truncated)
        self.sink = TrainSink(
            {"math": settings, "code": settings},
            SinkLimits(**{**defaults, **limits}),
            self.holdings,
            self.outcomes,
            on_settled=self.settled.append,
        )
        self._ids = itertools.count()

    def group(self, source: str = "math", *, version: int = 0, size: int | None = None) -> Group:
        at = next(self._ids)
        group = make_group(f"g{at}", size or self.group_size, version=version)
        group.source, group.task = source, make_task(at)
        return group

    async def arrive(self, group: Group, *traces: Says, ok: bool = True) -> Arrived:
        episode = make_episode(traces, group.task, self.store, ok=ok)
        event = Arrived(group, episode, read_payloads(episode))
        self.holdings.hold(event.payloads, "dispatcher")
        self.outcomes.start(1)
        await self.sink.add(event)
        return event

    async def fail(self, group: Group, kind: str = "task_error") -> None:
        self.outcomes.start(1)
        await self.sink.add(Arrived(group, failed_episode(group.task, group.source, kind, "no")))

    async def cancel(self, group: Group, count: int, reason: Reason, num_started: int | None = None) -> None:
        num = count if num_started is None else num_started
        self.outcomes.start(num)
        self.outcomes.cancel(num)
        await self.sink.add(Cancelled(Cancellation(group, reason, count, num, num, ())))

    async def whole(self, rewards: Sequence[float], source: str = "math", **says: Any) -> Group:
        group = self.group(source, size=len(rewards))
        for reward in rewards:
            await self.arrive(group, Says(reward=reward, **says))
        return group

    async def end(self) -> None:
        """Shut down and check that everything adds up."""
        self.sink.close()
        await self.holdings.close()
        counts = self.outcomes.counts
        assert self.outcomes.waiting == self.outcomes.in_flight == 0
        final = counts.trained + counts.errored + counts.cancelled + sum(counts.dropped.values())
        assert counts.started == final
        self.store.assert_clean()

    def train(self, batch: Any) -> None:
        """Ship, and free as the trainer does."""
        self.sink.shipped(batch)
        self.store.release([sample.payload for sample in batch.samples], "trainer")
