"""References to per-token arrays, and the ledger that accounts for them.

A *blob* holds the arrays of one branch (docs/protocols.md section 2); a `BranchPayload` is what the worker
writes about it on the trace; a `PayloadSlice` is how everybody else names the part of it that is trained.
No record here ever holds a per-token value.
"""

from __future__ import annotations

import msgspec


class NodeSpan(msgspec.Struct, frozen=True, array_like=True):
    """Where one message node of a branch lies in the branch's tokens.

    `start`, `stop`: token range, half open. `sampled`: a model call produced the node. `first_trained`,
    `num_trained`: the tokens of it that this branch trains (`first_trained` is -1 when there are none).
    """

    node: int
    start: int
    stop: int
    sampled: bool
    first_trained: int
    num_trained: int


class BranchPayload(msgspec.Struct, frozen=True):
    """One kept branch, as written into `trace.info["moorage_payload"]["branches"]`.

    `branch`: index into the trace's branches. `num_tokens`: T of the blob. `num_trainable`: tokens this
    branch trains. `fields`: names of the arrays in the blob. `routing`: (hidden layers, k) of routed
    experts, or None. `versions`: oldest and newest policy version of its sampled tokens, None when the
    engine named none.
    """

    branch: int
    id: str
    num_tokens: int
    num_trainable: int
    fields: tuple[str, ...]
    routing: tuple[int, int] | None
    nbytes: int
    versions: tuple[int, int] | None
    spans: tuple[NodeSpan, ...]


class TracePayload(msgspec.Struct, frozen=True):
    """`trace.info["moorage_payload"]`: where a trace's blobs are, and what the detectors measured.

    `detected`: detector name to whether it fired anywhere in the trace (R19). `branches` may be empty.
    """

    url: str
    store: str
    detected: dict[str, bool] = {}
    branches: tuple[BranchPayload, ...] = ()


class PayloadSlice(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_tokens` tokens of blob `id` in store `store`, reachable at `url` (R3).

    `total_tokens` is the blob's own length; truncation only lowers `num_tokens`.
    """

    url: str
    store: str
    id: str
    num_tokens: int
    total_tokens: int
    fields: tuple[str, ...]
    routing: tuple[int, int] | None
    nbytes: int

    def cut(self, num_tokens: int) -> PayloadSlice:
        """This slice, at most `num_tokens` long."""
        if num_tokens >= self.num_tokens:
            return self
        return msgspec.structs.replace(self, num_tokens=num_tokens)


class PayloadRef(msgspec.Struct, frozen=True, array_like=True):
    """All that is needed to release a blob."""

    url: str
    store: str
    id: str


HOLDERS = ("env_server", "dispatcher", "train_sink", "eval_sink", "trainer", "shutdown")
"""Who may free a payload (docs/protocols.md section 2)."""


class Ledger(msgspec.Struct):
    """The account of one payload store, or the sum of several.

    `unknown` counts releases of ids never kept; `oldest_s` is the age of the oldest outstanding blob, 0 when
    there is none. `damaged` counts reads that found a kept blob missing or cut short on disk.
    """

    kept: int = 0
    kept_bytes: int = 0
    freed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(HOLDERS, 0))
    double_frees: int = 0
    unknown: int = 0
    outstanding: int = 0
    outstanding_bytes: int = 0
    peak_bytes: int = 0
    oldest_s: float = 0.0
    damaged: int = 0

    def add(self, other: Ledger) -> Ledger:
        """The sum of two stores' ledgers (ages: the older; peaks add)."""
        return Ledger(
            kept=self.kept + other.kept,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            freed={h: self.freed.get(h, 0) + other.freed.get(h, 0) for h in HOLDERS},
            double_frees=self.double_frees + other.double_frees,
            unknown=self.unknown + other.unknown,
            outstanding=self.outstanding + other.outstanding,
            outstanding_bytes=self.outstanding_bytes + other.outstanding_bytes,
            peak_bytes=self.peak_bytes + other.peak_bytes,
            oldest_s=max(self.oldest_s, other.oldest_s),
            damaged=self.damaged + other.damaged,
        )

    def since(self, start: Ledger) -> Ledger:
        """What happened since this account stood at `start`; what was outstanding then counts as kept.

        `peak_bytes` stays that of the whole account.
        """
        return msgspec.structs.replace(
            self,
            kept=self.kept - start.kept + start.outstanding,
            kept_bytes=self.kept_bytes - start.kept_bytes + start.outstanding_bytes,
            freed={holder: self.freed.get(holder, 0) - start.freed.get(holder, 0) for holder in HOLDERS},
            double_frees=self.double_frees - start.double_frees,
            unknown=self.unknown - start.unknown,
            damaged=self.damaged - start.damaged,
        )
