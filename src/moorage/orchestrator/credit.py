"""Credit per message node (R17). Pure.

One record per (trace id, node), in a table that the sink owns; `node.advantages` of verifiers stays None. A
node that nobody assigned has no record, which is not the same as a record of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec


class NodeCredit(msgspec.Struct, frozen=True):
    """Credit of one node's tokens. `rl`, `ce`, `ref_kl` weigh the loss components; `advantage` None: none."""

    advantage: float | None = None
    rl: float = 1.0
    ce: float = 0.0
    ref_kl: float = 0.0


class CreditTable:
    """Credit of the traces that a sink works on."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, NodeCredit]] = {}

    def assign(self, trace: Any, advantage: float, *, rl: float = 1.0) -> None:
        """One advantage for every sampled node of `trace`."""
        credit = NodeCredit(checked(advantage, trace.id), rl=rl)
        nodes = self._nodes.setdefault(trace.id, {})
        nodes.update((at, credit) for at, node in enumerate(trace.nodes) if node.sampled)

    def assign_node(self, trace: Any, node: int, credit: NodeCredit) -> None:
        """Credit of one node."""
        if not 0 <= node < len(trace.nodes):
            raise ValueError(f"trace {trace.id} has no node {node}")
        if credit.advantage is not None:
            checked(credit.advantage, trace.id)
        self._nodes.setdefault(trace.id, {})[node] = credit

    def weigh(self, trace: Any, nodes: Iterable[int], *, rl: float = 0.0, ce: float = 0.0) -> None:
        """Set loss weights of nodes, keeping the advantage they have."""
        table = self._nodes.setdefault(trace.id, {})
        for node in nodes:
            old = table.get(node, NodeCredit())
            table[node] = msgspec.structs.replace(old, rl=rl, ce=ce)

    def of(self, trace_id: str) -> dict[int, NodeCredit]:
        """Node index to credit; empty when nothing was assigned."""
        return self._nodes.get(trace_id, {})

    def forget(self, trace_id: str) -> None:
        self._nodes.pop(trace_id, None)

    def __len__(self) -> int:
        return len(self._nodes)


def checked(advantage: float, trace_id: str) -> float:
    """`advantage` as a float. Raises ValueError when it is not finite: it would poison the whole step."""
    value = float(advantage)
    if not math.isfinite(value):
        raise ValueError(f"trace {trace_id}: advantage {advantage} is not a finite number")
    return value


def read_advantage(nodes: dict[int, NodeCredit]) -> float | None:
    """One number for a trace: None when unassigned, 0 when all zero, else the mean of the nonzero ones."""
    assigned = [credit.advantage for credit in nodes.values() if credit.advantage is not None]
    if not assigned:
        return None
    nonzero = [value for value in assigned if value != 0.0]
    return math.fsum(nonzero) / len(nonzero) if nonzero else 0.0


def is_flat(nodes: dict[int, NodeCredit]) -> bool:
    """Assigned, zero everywhere, and no other loss component trains: nothing to learn from."""
    if any(credit.ce or credit.ref_kl for credit in nodes.values()):
        return False
    return read_advantage(nodes) == 0.0
