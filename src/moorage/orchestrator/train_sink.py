"""From finished train episodes to batches.

Owns the groups that are not complete, the scored traces that wait for a batch, and all trainer-bound state
(credit, samples, reasons), keyed by trace id. Promises:

- groups are told apart by their explicit id only; a group is finalised once, when what arrived and what was
  cancelled add up to its size; a stale group is void as a whole;
- every trace of an ok episode ends once: in a batch, or dropped; all reasons that apply are collected;
- no trace ships whose oldest token is more than `max_off_policy` versions behind (this sweep is the
  guarantee, the dispatcher's cancel only saves compute);
- every payload that does not ship is released as `train_sink`, once;
- traces ship in the order in which their groups completed.

Back-pressure is the loop's: it closes the dispatch gate while `num_waiting` is too large. Does not know
files, engines or the clock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from moorage.orchestrator.algorithms.base import ScoredGroup
from moorage.orchestrator.barren import Barren
from moorage.orchestrator.credit import CreditTable, is_flat, read_advantage
from moorage.orchestrator.events import Arrived, Cancelled, Event
from moorage.orchestrator.facts import EpisodeFacts, read_episode
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.metrics import TrainMarks
from moorage.orchestrator.outcomes import DROP_REASONS, Outcomes
from moorage.orchestrator.payloads import oldest_version, span_of
from moorage.orchestrator.samples import check_arrays, make_samples, prune_zero
from moorage.orchestrator.sink_records import Batch, Fate, Pending, Scored, SinkLimits, TrainSettings, Window
from moorage.orchestrator.survivors import check_payloads, is_candidate, survives
from moorage.orchestrator.trace_queue import TraceQueue
from moorage.records.payload import TracePayload
from moorage.records.sample import TrainSample


class TrainSink:
    """One per orchestrator; `add` is called by the consumer, `cut` by the ship path, on one loop."""

    def __init__(
        self,
        settings: Mapping[str, TrainSettings],
        limits: SinkLimits,
        holdings: Holdings,
        outcomes: Outcomes,
        *,
        on_settled: Callable[[str], None],
    ) -> None:
        """`on_settled(group id)`: trained or dropped for good; a resume need not run its task again."""
        self.settings = settings
        self.limits = limits
        self.window = Window()
        self.barren = Barren(
            batch_traces=limits.batch_traces, batch_tokens=limits.batch_tokens, seq_len=limits.seq_len
        )
        self._holdings = holdings
        self._outcomes = outcomes
        self._on_settled = on_settled
        self._credit = CreditTable()
        self._pending: dict[str, Pending] = {}
        self._queue = TraceQueue(limits)
        self._fates: dict[str, Fate] = {}
        self._facts: dict[str, EpisodeFacts] = {}

    # -- arrivals

    async def add(self, event: Event) -> None:
        """Take one event. Runs the algorithm's hooks; awaits them when they ask somebody."""
        pending = self._pending.get(event.group.id)
        if pending is None:
            pending = self._pending[event.group.id] = Pending(event.group)
        if isinstance(event, Cancelled):
            pending.missing += event.cancellation.count
            if event.cancellation.reason in ("stale", "shutdown"):
                pending.void = event.cancellation.reason
            _add_cancelled(pending, event)
        else:
            await self._add_episode(pending, event)
        if pending.is_complete:
            await self._score(pending)  # may await; until it is done the group counts as pending
            del self._pending[event.group.id]
            self._finalise(pending)

    async def _add_episode(self, pending: Pending, event: Arrived) -> None:
        episode = event.episode
        self._holdings.hand_over(event.payloads, "dispatcher", "train_sink")
        facts = read_episode(
            episode,
            env=event.group.source,
            group_id=event.group.id,
            span=span_of(event.payloads.values()),
            payloads=event.payloads,
        )
        self.window.arrived.append(facts)
        pending.facts.append(facts)
        pending.episodes.append(event)
        if not episode.ok:
            self._outcomes.error()
            self._holdings.release(event.payloads, "train_sink")
            return
        self._outcomes.arrive()
        self._facts[episode.id] = facts
        check_payloads(event)
        algorithm = self.settings[event.group.source].algorithm
        if any(is_candidate(trace) for trace in episode.traces):
            await _maybe(algorithm.score_episode(episode, self._credit))

    # -- complete groups

    async def _score(self, pending: Pending) -> None:
        """Have the algorithm score the survivors of a group that is not void."""
        ok = pending.ok
        alive = [trace.id for event in ok for trace in event.episode.traces if survives(trace)]
        if pending.void or not alive:
            return
        group = ScoredGroup(
            id=pending.group.id,
            source=pending.group.source,
            episodes=[event.episode for event in ok],
            survivors=frozenset(alive),
        )
        self.window.num_lone += len(alive) == 1
        await _maybe(self.settings[group.source].algorithm.score_group(group, self._credit))

    def _finalise(self, pending: Pending) -> None:
        self.window.episodes += pending.facts
        if pending.void:
            for event in pending.ok:
                self._drop_episode(event, pending.void)
            self._settle_if_done(pending.group.id)
            return
        num_before = len(self._queue)
        for event in pending.ok:
            self._decide(event)
        queued = len(self._queue) > num_before
        self.barren.group(pending.group.source, pending.group.size, pending.episodes, queued=queued)
        self._settle_if_done(pending.group.id)

    def _decide(self, event: Arrived) -> None:
        """Queue or drop each trace of a scored episode."""
        fate = self._fates[event.episode.id] = Fate(open=len(event.episode.traces))
        for trace in event.episode.traces:
            if survives(trace):
                self._decide_survivor(event, trace)
            else:
                self._drop_trace(event, trace, "unscored" if is_candidate(trace) else "untrainable")
        self._end_if_final(event.episode.id, fate)

    def _decide_survivor(self, event: Arrived, trace: Any) -> None:
        """Collect every reason, then act on those that keep a trace out of the queue."""
        payload = event.payloads[trace.id]
        assert payload is not None
        credit = self._credit.of(trace.id)
        samples = self._make_samples(event, trace.id, payload)
        reasons = {name for name, fired in payload.detected.items() if fired and name in DROP_REASONS}
        keep_out = {name for name in reasons if getattr(self.limits.drop, name, False)}
        flat = is_flat(credit)
        if flat:
            reasons.add("zero_advantage")
        if not payload.branches:
            keep_out.add("untrainable")
        elif not credit:
            keep_out.add("unassigned")
        elif not samples:
            keep_out.add("truncated")
        self.window.decisions.append(frozenset(reasons | keep_out))
        advantage = read_advantage(credit)
        self._credit.forget(trace.id)
        admitted = not keep_out and not (
            flat and self.limits.drop.zero_advantage
        )  # which is pruned at the cut
        self.window.marks[trace.id] = TrainMarks(advantage, admitted)
        if keep_out:
            self._drop_trace(event, trace, next(name for name in DROP_REASONS if name in keep_out))
            return
        oldest = oldest_version(payload)
        scored = Scored(
            trace=trace,
            arrived=event,
            facts=self._facts[event.episode.id],
            samples=tuple(samples),
            oldest=event.group.version if oldest is None else oldest,
            advantage=advantage,
        )
        used = {sample.payload.id for sample in samples}
        self._holdings.release_ids(
            [branch.id for branch in payload.branches if branch.id not in used], "train_sink"
        )
        self._queue.put(scored)

    def _make_samples(self, event: Arrived, trace_id: str, payload: TracePayload) -> list[TrainSample]:
        settings = self.settings[event.group.source]
        samples = make_samples(
            payload,
            self._credit.of(trace_id),
            env=event.group.source,
            trace_id=trace_id,
            temperature=settings.temperature,
            seq_len=self.limits.seq_len,
        )
        for sample in samples:
            check_arrays(sample, routing=self.limits.require_routing, kept_sets=settings.truncated)
        return samples

    # -- batches

    @property
    def num_waiting(self) -> int:
        """Scored traces that wait for a batch."""
        return len(self._queue)

    def batches_waiting(self, max_traces: int | None = None) -> float:
        """How full the queue is, 1 at its bound: `max_traces`, or four batches."""
        return self._queue.fullness(max_traces)

    @property
    def num_pending(self) -> int:
        """Groups that are not complete."""
        return len(self._pending)

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be cut, staleness aside."""
        return self._queue.is_ready

    def sweep(self, step: int) -> int:
        """Drop queued traces too stale for the batch of `step`; how many."""
        stale = self._queue.stale(step - 1 - self.limits.max_off_policy)
        for scored in stale:
            self._queue.take(scored)
            self._drop_trace(scored.arrived, scored.trace, "stale")
            self._end_and_settle(scored)
        return len(stale)

    def cut(self, step: int) -> Batch | None:
        """The batch of `step` and the window that ends with it, or None: not enough waits.

        A batch may come out smaller than asked for, because zero credit is pruned after selection. When
        nothing is left of it, its traces are dropped, the window goes on, and None is returned.
        """
        self.sweep(step)
        if not self.is_ready:
            return None
        samples: list[TrainSample] = []
        cohort: list[Scored] = []
        for scored in self._queue.next_batch():
            self._queue.take(scored)
            kept = self._prune(scored)
            if kept:
                samples += kept
                cohort.append(scored)
                self._fates[scored.arrived.episode.id].trained = True
                self._fates[scored.arrived.episode.id].open -= 1
                self.window.marks[scored.trace.id] = TrainMarks(scored.advantage, True)
            else:
                self._drop_trace(scored.arrived, scored.trace, "zero_advantage")
            self._end_and_settle(scored)
        if not samples:
            self.barren.empty()
            return None
        self.barren.shipped()
        window, self.window = self.window, Window()
        return Batch(step, samples, cohort, window)

    def _prune(self, scored: Scored) -> list[TrainSample]:
        """The samples that still train; the payloads of the others are released."""
        if not self.limits.drop.zero_advantage:
            return list(scored.samples)
        pruned = [(sample, prune_zero(sample)) for sample in scored.samples]
        kept = [after for _, after in pruned if after is not None]
        if kept:  # else the whole trace is dropped by the caller
            gone = [before.payload.id for before, after in pruned if after is None]
            self._holdings.release_ids(gone, "train_sink")
        return kept

    def shipped(self, batch: Batch) -> None:
        """The batch is READY: its payloads are the trainer's."""
        self._holdings.ship(batch.blob_ids, "train_sink")

    def close(self) -> None:
        """The run ends: everything that waits is dropped as `shutdown`. Payloads still held here are then
        released by the holdings, as `shutdown`."""
        for pending in self._pending.values():
            for event in pending.episodes:
                if event.episode.ok:
                    self._outcomes.drop("shutdown")
        self._pending.clear()
        self.window = Window()
        for scored in self._queue.all:
            self._queue.take(scored)
            fate = self._fates[scored.arrived.episode.id]
            fate.open -= 1
            fate.reasons.append("shutdown")
            self._end_if_final(scored.arrived.episode.id, fate)

    # -- ends

    def _drop_episode(self, event: Arrived, reason: str) -> None:
        self._holdings.release(event.payloads, "train_sink")
        for trace in event.episode.traces:
            self._credit.forget(trace.id)
        if reason == "stale":
            self.window.num_stale += len(event.episode.traces)
        del self._facts[event.episode.id]
        self._outcomes.drop(reason)

    def _drop_trace(self, event: Arrived, trace: Any, reason: str) -> None:
        """One trace will not train. The caller has taken it out of the queue and ends the episode if it
        may."""
        self._holdings.release([trace.id], "train_sink")
        self._credit.forget(trace.id)
        self.window.num_stale += reason == "stale"
        fate = self._fates[event.episode.id]
        fate.open -= 1
        fate.reasons.append(reason)

    def _end_and_settle(self, scored: Scored) -> None:
        episode_id = scored.arrived.episode.id
        fate = self._fates[episode_id]
        if fate.trained:
            self._on_settled(scored.arrived.group.id)
        self._end_if_final(episode_id, fate)
        self._settle_if_done(scored.arrived.group.id)

    def _end_if_final(self, episode_id: str, fate: Fate) -> None:
        if fate.open:
            return
        del self._fates[episode_id], self._facts[episode_id]
        if fate.trained:
            self._outcomes.train()
        else:
            self._outcomes.drop(min(fate.reasons or ["untrainable"], key=_seriousness))

    def _settle_if_done(self, group_id: str) -> None:
        if not self._queue.has_group(group_id) and group_id not in self._pending:
            self._on_settled(group_id)


def _add_cancelled(pending: Pending, event: Cancelled) -> None:
    """Cancelled episodes have no traces and belong to no agent."""
    group = event.group
    for at in range(event.cancellation.count):
        pending.facts.append(
            EpisodeFacts(f"{group.id}/{at}", group.source, group.id, False, (), cancelled=True, sums={})
        )


def _seriousness(reason: str) -> int:
    return DROP_REASONS.index(reason)


async def _maybe(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
