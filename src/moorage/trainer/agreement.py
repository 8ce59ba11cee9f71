"""What the ranks of a trainer decide together, so that each takes the same way.

Promises:
- a rank that cannot go on never leaves the others waiting in a collective: all stop (`on_all_ranks`);
- failed fetches are agreed with one all-reduce, before any divisor is computed (`agree_dropped`, R6);
- a payload that several ranks hold is deleted by the lowest of them (`first_owners`, R5).

Does not know where batches come from, nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from moorage.core.errors import ExchangeError, RunEnded
from moorage.records.payload import PayloadRef, PayloadSlice
from moorage.trainer.world import World

T = TypeVar("T")
Ref = PayloadRef | PayloadSlice


def on_all_ranks(world: World, act: Callable[[], T]) -> T:
    """`act()` on every rank; when one raises RunEnded or ExchangeError, every rank raises. Collective."""
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(act())
    except (RunEnded, ExchangeError) as caught:
        error = caught
    failures = int(world.all_reduce(torch.tensor([float(error is not None)]))[0])
    if error is not None:
        raise error
    if failures:
        raise RunEnded(f"{failures} other rank(s) of the trainer stopped")
    return result[0]


def agree_dropped(world: World, step: int, failed: Sequence[bool], num_owned: int) -> int:
    """How many micro batches of `step` are dropped over all data ranks. Collective: one all-reduce.

    `failed`: a bit per micro batch of this rank. `num_owned`: its micro batches that are no dummies. When
    nothing is left to train on every rank raises: the main rank ExchangeError with the message for people,
    the others RunEnded.
    """
    width = len(failed)
    bits = torch.zeros(world.size, width + 1)
    bits[world.rank, :width] = torch.tensor(failed, dtype=torch.float32)
    bits[world.rank, width] = num_owned
    agreed = world.all_reduce(bits)
    num_dropped, total = int(agreed[:, :width].sum()), int(agreed[:, width].sum())
    if total and num_dropped == total:
        if not world.is_main:
            raise RunEnded(f"step {step}: nothing to train on, as the main rank says")
        raise ExchangeError(
            f"step {step}: no payload of its {total} micro batches could be fetched anywhere. Payloads are "
            "deleted after their step; to train again on the batches after a checkpoint, run with "
            'payload.retain = "checkpoint"'
        )
    return num_dropped


def first_owners(refs: Sequence[Ref], world: World) -> list[Ref]:
    """`refs` without those that a lower rank holds too. Collective: ranks compare 64 bits of each id."""
    taken: set[int] = set()
    if world.size > 1:
        longest = int(world.all_reduce(torch.tensor([len(refs)]), "max")[0])
        padded = torch.zeros(longest + 1, dtype=torch.int64)
        padded[0] = len(refs)
        padded[1 : len(refs) + 1] = torch.tensor([_short_id(ref) for ref in refs], dtype=torch.int64)
        for other in world.all_gather(padded)[: world.rank]:
            taken.update(other[1 : int(other[0]) + 1].tolist())
    unique: dict[str, Ref] = {}
    for ref in refs:
        if _short_id(ref) not in taken:
            unique.setdefault(ref.id, ref)
    return list(unique.values())


def _short_id(ref: Ref) -> int:
    return int(ref.id[:16], 16) - (1 << 63)
