"""Scored traces that wait for a batch, in the order in which their groups completed. Pure.

Knows how many make a batch, how full it is, which are too stale and which go next; who takes traces out says
what becomes of them.
"""

from __future__ import annotations

from collections import Counter

from moorage.orchestrator.sink_records import Scored, SinkLimits

FULL_BATCHES = 4


class TraceQueue:
    def __init__(self, limits: SinkLimits) -> None:
        self._limits = limits
        self._traces: dict[str, Scored] = {}
        self._of_group: Counter[str] = Counter()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._traces)

    def put(self, scored: Scored) -> None:
        self._traces[scored.trace.id] = scored
        self._of_group[scored.arrived.group.id] += 1
        self._num_tokens += scored.num_tokens

    def take(self, scored: Scored) -> None:
        """Out of the queue with it."""
        del self._traces[scored.trace.id]
        self._num_tokens -= scored.num_tokens
        group_id = scored.arrived.group.id
        self._of_group[group_id] -= 1
        if not self._of_group[group_id]:
            del self._of_group[group_id]

    def has_group(self, group_id: str) -> bool:
        """Whether a trace of this group waits."""
        return group_id in self._of_group

    @property
    def all(self) -> list[Scored]:
        return list(self._traces.values())

    def fullness(self, max_traces: int | None = None) -> float:
        """How full it is, 1 at its bound: `max_traces`, or four batches."""
        if max_traces is not None:
            return len(self._traces) / max_traces
        if self._limits.batch_traces is not None:
            return len(self._traces) / (FULL_BATCHES * self._limits.batch_traces)
        assert self._limits.batch_tokens is not None
        return self._num_tokens / (FULL_BATCHES * self._limits.batch_tokens)

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be cut, staleness aside."""
        return self._is_enough(len(self._traces), self._num_tokens)

    def next_batch(self) -> list[Scored]:
        """The first traces that make a batch; all when they do not."""
        chosen, num_tokens = [], 0
        for scored in self._traces.values():
            chosen.append(scored)
            num_tokens += scored.num_tokens
            if self._is_enough(len(chosen), num_tokens):
                break
        return chosen

    def stale(self, min_fresh: int) -> list[Scored]:
        """Those whose oldest token is of a version before `min_fresh`."""
        return [s for s in self._traces.values() if s.oldest is not None and s.oldest < min_fresh]

    def _is_enough(self, num_traces: int, num_tokens: int) -> bool:
        if self._limits.batch_traces is not None:
            return num_traces >= self._limits.batch_traces
        assert self._limits.batch_tokens is not None
        return num_tokens >= self._limits.batch_tokens
