"""Which bytes of a blob are needed for its first n tokens. Pure: how bytes are read comes as an argument.

A blob that is mostly cut away is not worth transferring whole (`is_worth_cutting`). Then the header tells
where the fields lie, and one range per field asks for the kept prefix. Fields whose rows depend on others
(heads on `loss_mask`, sampling ids on `sampling_counts`) need those first, so the ranges come in two rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.buffers import Buffers, Target
from moorage.payload.codec import BranchArrays, FieldLayout, check, header_nbytes, kept_rows, read_layout

FIRST_ROUND = ("token_ids", "loss_mask", "logprobs", "content_mask", "sampling_counts", "routed_experts")
SECOND_ROUND = ("sampling_ids", "head_ids", "head_logprobs")
MIN_SAVING_BYTES = 256 * 1024
_HEADER_GUESS = 1024


class ReadInto(Protocol):
    """Reads a blob, or its bytes `span` (start, stop), into `target`, and returns what it filled."""

    def __call__(self, target: Target, span: tuple[int, int] | None = None) -> np.ndarray: ...


def is_worth_cutting(num_tokens: int, total_tokens: int, nbytes: int) -> bool:
    """Whether to fetch ranges: under half is kept, and that saves more than the round trips cost."""
    return (
        2 * num_tokens < total_tokens
        and nbytes * (total_tokens - num_tokens) > MIN_SAVING_BYTES * total_tokens
    )


def read_prefix(read: ReadInto, num_tokens: int, nbytes: int, buffers: Buffers) -> BranchArrays:
    """The first `num_tokens` tokens of a blob of `nbytes`. Raises PayloadError when it is no such blob."""
    head = _read_span(read, buffers, 0, min(_HEADER_GUESS, nbytes))
    if (size := header_nbytes(head.data)) > len(head):
        head = _read_span(read, buffers, 0, min(size, nbytes))
    layout = read_layout(head.data)
    kept = BranchArrays(**_read_fields(read, first_layout(layout, num_tokens), buffers))
    kept = replace(kept, **_read_fields(read, second_layout(layout, kept), buffers))
    check(kept)
    return kept


def _read_fields(
    read: ReadInto, layout: Mapping[str, FieldLayout], buffers: Buffers
) -> dict[str, np.ndarray]:
    return {
        name: _read_span(read, buffers, field.offset, field.nbytes).view(field.dtype).reshape(field.shape)
        for name, field in layout.items()
    }


def _read_span(read: ReadInto, buffers: Buffers, start: int, size: int) -> np.ndarray:
    target = buffers.take(size)
    if size:
        read(target, (start, start + size))
    return target


def first_layout(layout: Mapping[str, FieldLayout], num_tokens: int) -> dict[str, FieldLayout]:
    """The first `num_tokens` rows of the fields that have one row per token."""
    if num_tokens > layout["token_ids"].shape[0]:
        raise PayloadError(f"cannot keep {num_tokens} of {layout['token_ids'].shape[0]} tokens")
    return {name: _cut(layout[name], num_tokens) for name in FIRST_ROUND if name in layout}


def second_layout(layout: Mapping[str, FieldLayout], kept: BranchArrays) -> dict[str, FieldLayout]:
    """The rows of the other fields that belong to the tokens of `kept` (the first round's arrays)."""
    rows = kept_rows(kept, kept.num_tokens)
    return {name: _cut(layout[name], rows[name]) for name in SECOND_ROUND if name in layout}


def _cut(field: FieldLayout, rows: int) -> FieldLayout:
    if rows > field.shape[0]:
        raise PayloadError(f"blob has {field.shape[0]} rows where {rows} are needed")
    return replace(field, shape=(rows, *field.shape[1:]))
