"""Ends a run that produces nothing to train, with the reason (pure counting; raising is the only effect)."""

from __future__ import annotations

from collections.abc import Sequence

from moorage.core.errors import ConfigError
from moorage.core.log import get_logger
from moorage.orchestrator.events import Arrived

log = get_logger(__name__)

MAX_BARREN = 10


class Barren:
    """Counts, in batches, what in a row gave nothing to train, and batches in a row that were all zero
    credit."""

    def __init__(self, *, batch_traces: int | None, batch_tokens: int | None, seq_len: int) -> None:
        self.num_barren = 0.0
        self.num_empty = 0
        self._batch_traces = batch_traces
        self._batch_tokens = batch_tokens
        self._seq_len = seq_len

    def group(self, source: str, size: int, episodes: Sequence[Arrived], *, queued: bool) -> None:
        """A group was finalised. Warns per batch's worth that gave nothing, raises after ten in a row."""
        if queued:
            self.num_barren = 0.0
            return
        before = int(self.num_barren)
        self.num_barren += self._share(size, [event for event in episodes if event.episode.ok])
        if int(self.num_barren) == before:
            return
        errors = last_errors(episodes)
        log.warning(
            "source `%s`: episodes worth %d batches in a row gave nothing to train (last errors: %s)",
            source,
            int(self.num_barren),
            errors,
        )
        if self.num_barren >= MAX_BARREN:
            raise ConfigError(
                f"episodes worth {MAX_BARREN} batches in a row gave nothing to train; last errors of source "
                f"`{source}`: {errors}. Try it with `moorage env-server --check`."
            )

    def shipped(self) -> None:
        """A batch had samples."""
        self.num_empty = 0

    def empty(self) -> None:
        """A batch was cut and nothing was left of it."""
        self.num_empty += 1
        log.warning("a whole batch had zero credit only (%d in a row)", self.num_empty)
        if self.num_empty >= MAX_BARREN:
            raise ConfigError(
                f"{MAX_BARREN} batches in a row had zero credit only: all rewards within each group are "
                "equal. Choose easier or harder tasks, a larger group_size, or drop.zero_advantage = false"
            )

    def _share(self, size: int, ok: Sequence[Arrived]) -> float:
        if self._batch_traces is not None:
            return max(sum(len(event.episode.traces) for event in ok), size) / self._batch_traces
        assert self._batch_tokens is not None
        tokens = sum(event.episode.num_total_tokens for event in ok)
        return (tokens or self._seq_len * size) / self._batch_tokens


def last_errors(episodes: Sequence[Arrived]) -> str:
    """What went wrong in these episodes, each error once."""
    errors = [
        f"{error.type}: {error.message}"
        for event in episodes
        for error in [*event.episode.errors[-1:], *(e for t in event.episode.traces for e in t.errors[-1:])]
    ]
    return "; ".join(dict.fromkeys(errors)) or "none: no trainable trace, or none with a reward"
