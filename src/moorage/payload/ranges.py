"""Which bytes of a blob are needed for its first n tokens. Pure.

A blob that is mostly cut away is not worth transferring whole (`is_worth_cutting`). Then the header tells
where the fields lie, and one range per field asks for the kept prefix. Fields whose rows depend on others
(heads on `loss_mask`, sampling ids on `sampling_counts`) need those first, so the ranges come in two rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moorage.core.errors import PayloadError
from moorage.payload.codec import BranchArrays, FieldLayout, kept_rows

FIRST_ROUND = ("token_ids", "loss_mask", "logprobs", "content_mask", "sampling_counts", "routed_experts")
SECOND_ROUND = ("sampling_ids", "head_ids", "head_logprobs")
MIN_SAVING_BYTES = 256 * 1024


def is_worth_cutting(num_tokens: int, total_tokens: int, nbytes: int) -> bool:
    """Whether to fetch ranges: under half is kept, and that saves more than the round trips cost."""
    return (
        2 * num_tokens < total_tokens
        and nbytes * (total_tokens - num_tokens) > MIN_SAVING_BYTES * total_tokens
    )


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
