"""What became of every episode that was started. Pure.

    started = trained + dropped (by reason) + errored + cancelled + waiting + in flight

holds after every call, over all attempts of a run. The unit is the train episode: a retry after an
infrastructure failure is the same episode; an episode that no run began is not started. Its end is decided
once: trained when any of its traces shipped, else dropped under the first of its reasons.
"""

from __future__ import annotations

import msgspec

DROP_REASONS = (
    "stale",
    "gibberish",
    "repetition",
    "unscored",
    "untrainable",
    "unassigned",
    "truncated",
    "zero_advantage",
    "shutdown",
)
"""Why a train episode that came back whole was not trained.

stale: too many versions behind. gibberish, repetition: a detector that drops. unscored: no reward, or one
that is not a number. untrainable: no trace that trains (no trainable agent, nothing sampled). unassigned: the
algorithm gave no credit. truncated: nothing trainable lies below seq_len. zero_advantage: nothing but credit
0. shutdown: the run ended first.
"""


class OutcomeCounts(msgspec.Struct):
    """Counts over the whole run, as saved with a checkpoint."""

    started: int = 0
    trained: int = 0
    errored: int = 0
    cancelled: int = 0
    retried: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))


class Outcomes:
    """Moves episodes from in flight over waiting to their end."""

    def __init__(self, counts: OutcomeCounts | None = None) -> None:
        self.counts = counts or OutcomeCounts()
        self.in_flight = 0
        self.waiting = 0
        if counts is not None:  # what the earlier attempt had under way was lost with it
            self.counts.cancelled += self._balance()

    def start(self, num: int) -> None:
        self.counts.started += num
        self.in_flight += num

    def retry(self, num: int) -> None:
        self.counts.retried += num

    def arrive(self, num: int = 1) -> None:
        """An ok episode came back and now waits for its group and its batch."""
        self._leave_flight(num)
        self.waiting += num

    def error(self, num: int = 1) -> None:
        self._leave_flight(num)
        self.counts.errored += num

    def cancel(self, num: int) -> None:
        self._leave_flight(num)
        self.counts.cancelled += num

    def train(self, num: int = 1) -> None:
        self._leave_waiting(num)
        self.counts.trained += num

    def drop(self, reason: str, num: int = 1) -> None:
        self._leave_waiting(num)
        self.counts.dropped[reason] += num

    def snapshot(self) -> OutcomeCounts:
        """A copy of the counts."""
        return msgspec.convert(msgspec.to_builtins(self.counts), OutcomeCounts)

    def metrics(self) -> dict[str, float]:
        """Cumulative series for the summary, and the two that are not final yet."""
        counts = self.counts
        values: dict[str, float] = {
            "episodes/started": counts.started,
            "episodes/trained": counts.trained,
            "episodes/errored": counts.errored,
            "episodes/cancelled": counts.cancelled,
            "episodes/retried": counts.retried,
            "episodes/waiting": self.waiting,
            "episodes/in_flight": self.in_flight,
        }
        return values | {f"episodes/dropped/{reason}": num for reason, num in counts.dropped.items()}

    def _balance(self) -> int:
        counts = self.counts
        final = counts.trained + counts.errored + counts.cancelled + sum(counts.dropped.values())
        return counts.started - final - self.waiting - self.in_flight

    def _leave_flight(self, num: int) -> None:
        if num > self.in_flight:
            raise ValueError(f"{num} episodes ended, {self.in_flight} are in flight")
        self.in_flight -= num

    def _leave_waiting(self, num: int) -> None:
        if num > self.waiting:
            raise ValueError(f"{num} episodes ended, {self.waiting} are waiting")
        self.waiting -= num
