"""What the model calls of running episodes returned, beside verifiers' own message graph.

A verifiers node has no place for weight versions, top-k heads or unusable log-probabilities, and carries
routing rows as base64. So every call's arrays wait here as numpy, keyed by trace and by the node they belong
to, until `keep` encodes them or the run ends.

Promises: `Run.close()` forgets every trace of the run, whatever its ending; a turn is found by the identity
of the log-probability list that verifiers stores on the node, so equal answers are never mistaken for each
other. Does not know: engines, episodes, blobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

Versions = tuple[tuple[int | None, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The arrays of one model call: a prompt of `prompt_len` tokens and n sampled ones.

    `logprobs` float32 [n], nan where unusable. `versions`: (version, start, stop) over the sampled tokens.
    `policy`: the run's own policy sampled it. `rows` [r, layers, k] routes tokens `rows_start` and on of
    prompt and completion. `mask_counts` int32 [n], `mask_ids` int32 [sum]; `head_ids`, `head_logprobs` are
    [n, k].
    """

    prompt_len: int
    logprobs: np.ndarray
    versions: Versions = ()
    policy: bool = True
    rows: np.ndarray | None = None
    rows_start: int = 0
    mask_counts: np.ndarray | None = None
    mask_ids: np.ndarray | None = None
    head_ids: np.ndarray | None = None
    head_logprobs: np.ndarray | None = None

    @property
    def routed_to(self) -> int:
        """Tokens of the sequence that have a routing row, given that those before `rows_start` have one."""
        return self.rows_start + (0 if self.rows is None else len(self.rows))


@dataclass(slots=True)
class _Trace:
    run: Run
    turns: dict[int, tuple[list[float], Turn]] = field(default_factory=dict)


class SideTable:
    """Turns of the traces that run now."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def begin(self, *, model: str, deadline_s: float) -> Run:
        """A run of an env: `model` is what its policy is called, `deadline_s` what is left for it."""
        return Run(self, model, time.monotonic() + deadline_s)

    def run_of(self, trace_id: str | None) -> Run | None:
        """The run that a trace belongs to."""
        entry = self._traces.get(trace_id or "")
        return None if entry is None else entry.run

    def record(self, trace_id: str | None, key: list[float], turn: Turn) -> None:
        """Remember `turn` under the list that will become its node's `logprobs`."""
        entry = self._traces.get(trace_id or "")
        if entry is not None:
            entry.turns[id(key)] = (key, turn)

    def find(self, trace_id: str, key: Any) -> Turn | None:
        """The turn whose log-probability list is `key` itself."""
        entry = self._traces.get(trace_id)
        found = None if entry is None else entry.turns.get(id(key))
        return None if found is None else found[1]

    def _open(self, trace_id: str, run: Run) -> None:
        self._traces[trace_id] = _Trace(run)

    def _drop(self, trace_ids: Iterable[str]) -> None:
        for trace_id in trace_ids:
            self._traces.pop(trace_id, None)


class Run:
    """One run of an env; a context manager that forgets its turns at the end.

    Pass `watch` as `on_trace` of verifiers' `run_slot`.
    """

    def __init__(self, table: SideTable, model: str, deadline: float) -> None:
        self.model = model
        self._table = table
        self._deadline = deadline
        self._trace_ids: list[str] = []

    def watch(self, trace: Any) -> None:
        """A trace of this run begins."""
        self._trace_ids.append(trace.id)
        self._table._open(trace.id, self)

    @property
    def remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def close(self) -> None:
        self._table._drop(self._trace_ids)
        self._trace_ids.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
