"""Exact causal attention over packed rows, for any transformers model that uses its attention interface.

Owns the packed layout of one row and the attention function that `trainer.attention = "packed_sdpa"` names.

Promises:
- tokens of one sequence never see tokens of another, whatever the model passes as a mask: boundaries come
  from the `PackedLayout` that the trainer sets, and from nothing else;
- cost is linear in the number of sequences: rows are unpacked to [n, heads, longest, dim], sequences of like
  length together, and packed again;
- sliding windows and attention sinks are honoured; soft-capped scores and position biases are refused.

Does not know: models, losses. transformers' own detection of packing is not used: it is silently skipped in
several cases (docs/decisions), so `selfcheck` compares both ways on the loaded model at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from moorage.core.errors import ConfigError

PACKED_SDPA = "packed_sdpa"
_REGISTERED = "moorage_packed"  # transformers refuses names that hold "sdpa" for models it knows no sdpa of
_SPLIT_RATIO = 2.0  # a bucket holds lengths within this factor, once it saves enough to pay for its kernels
_SPLIT_TOKENS = 512


@dataclass(frozen=True)
class Bucket:
    """Sequences of like length that attend together: `slots[i]` is where row token `tokens[i]` goes in the
    padded [num, longest] grid."""

    tokens: torch.Tensor
    slots: torch.Tensor
    num: int
    longest: int


@dataclass(frozen=True)
class PackedLayout:
    """Where each sequence of a packed row lies. `starts` and `seq_lens` are plain ints, in row order."""

    seq_lens: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    position_ids: torch.Tensor
    inverse: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return int(self.position_ids.numel())

    @property
    def padded_tokens(self) -> int:
        """Token positions that attention computes, padding included."""
        return sum(bucket.num * bucket.longest for bucket in self.buckets)


def make_layout(seq_lens: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
    """The layout of a row that holds sequences of these lengths, one after the other."""
    if not seq_lens or min(seq_lens) < 1:
        raise ValueError(f"a packed row needs sequences of at least one token, got lengths {list(seq_lens)}")
    lens = torch.tensor(seq_lens)
    ends = lens.cumsum(0)
    starts = ends - lens
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(starts, lens)
    buckets = [_make_bucket(group, lens, starts, device) for group in _group_by_length(list(seq_lens))]
    inverse = None
    if len(buckets) > 1:
        inverse = torch.argsort(torch.cat([bucket.tokens.cpu() for bucket in buckets])).to(device)
    return PackedLayout(tuple(seq_lens), tuple(buckets), positions.to(device), inverse)


def _group_by_length(seq_lens: list[int]) -> list[list[int]]:
    """Indices of sequences, split into groups so that padding is never much more than the tokens."""
    order = sorted(range(len(seq_lens)), key=lambda index: (-seq_lens[index], index))
    groups: list[list[int]] = [[order[0]]]
    for place, index in enumerate(order[1:], start=1):
        longest = seq_lens[groups[-1][0]]
        wasted = (longest - seq_lens[index]) * (len(order) - place)
        if longest > _SPLIT_RATIO * seq_lens[index] and wasted > _SPLIT_TOKENS:
            groups.append([index])
        else:
            groups[-1].append(index)
    return [sorted(group) for group in groups]


def _make_bucket(
    group: list[int], lens: torch.Tensor, starts: torch.Tensor, device: torch.device | str
) -> Bucket:
    own = lens[group]
    longest = int(own.max())
    offsets = torch.arange(int(own.sum())) - torch.repeat_interleave(own.cumsum(0) - own, own)
    rows = torch.repeat_interleave(torch.arange(len(group)), own)
    tokens = torch.repeat_interleave(starts[group], own) + offsets
    return Bucket(tokens.to(device), (rows * longest + offsets).to(device), len(group), longest)


_current: list[PackedLayout] = []


@contextmanager
def packed_as(layout: PackedLayout) -> Iterator[None]:
    """Forward and backward passes inside see rows packed as `layout`.

    It must enclose the backward pass too: activation checkpointing runs the forward pass again there. A plain
    module variable, not a context variable, because autograd runs device work on threads of its own.
    """
    _current.append(layout)
    try:
        yield
    finally:
        _current.pop()


def implementation_name(attention: str) -> str:
    """What transformers calls the attention that `trainer.attention` names, registered there if it is ours.

    transformers makes no mask for names it does not know, which is what we want.
    """
    if attention != PACKED_SDPA:
        return attention
    from transformers import AttentionInterface

    AttentionInterface.register(_REGISTERED, packed_sdpa)
    return _REGISTERED


@torch.compiler.disable
def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one packed row: query [1, heads, T, d], key and value [1, kv heads, T, d], to
    [1, T, heads, d].

    `s_aux`: one attention-sink logit per head. Raises ConfigError on what it cannot compute exactly.
    """
    del attention_mask, dropout  # the layout decides who sees whom; training runs without dropout
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}, which trainer.attention = packed_sdpa lacks"
            )
    if not _current:
        raise RuntimeError("packed_sdpa ran outside packed_as(layout)")
    layout = _current[-1]
    outputs = []
    for bucket in layout.buckets:
        q, k, v = (_unpack(tensor[0], bucket) for tensor in (query, key, value))
        out = _attend(q, k, v, scaling, sliding_window, s_aux)
        out = out.transpose(1, 2).reshape(bucket.num * bucket.longest, out.shape[1], out.shape[3])
        outputs.append(out.index_select(0, bucket.slots))
    joined = outputs[0] if layout.inverse is None else torch.cat(outputs).index_select(0, layout.inverse)
    return joined[None], None


def _unpack(tensor: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[heads, T, d] to [num, heads, longest, d], zeros where a sequence has ended."""
    rows = tensor.transpose(0, 1)
    if bucket.tokens.numel() != rows.shape[0]:
        rows = rows.index_select(0, bucket.tokens)
    grid = rows.new_zeros(bucket.num * bucket.longest, *rows.shape[1:]).index_copy(0, bucket.slots, rows)
    return grid.view(bucket.num, bucket.longest, *rows.shape[1:]).transpose(1, 2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    length = q.shape[2]
    mask = None
    if window is not None and window < length:
        at = torch.arange(length, device=q.device)
        ahead = at[:, None] - at[None, :]
        mask = (ahead >= 0) & (ahead < window)
    if sinks is not None:
        return _attend_with_sinks(q, k, v, scaling, mask, sinks)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """A sink is one more key with score `sinks[head]` and value zero."""
    heads, length = q.shape[1], q.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    bias = bias.expand(heads, length, length)
    sink = sinks.to(q.dtype).reshape(heads, 1, 1).expand(heads, length, 1)
    k, v = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
    repeat = heads // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.cat([bias, sink], -1)[None].expand(q.shape[0], -1, -1, -1), scale=scaling
    )
