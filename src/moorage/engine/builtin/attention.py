"""Attention over the slot cache, registered with transformers under `NAME`.

A model whose attention implementation is `NAME` builds no masks of its own; it hands queries, and the
`Layout` that the runner passed to its forward, down to `attend`. Sliding windows are applied here, from the
window that the layer itself names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from moorage.engine.builtin.cache import Layout

NAME = "moorage_slots"


def attend(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, dim]; key and value [1, kv heads, tokens, dim]; out [1, tokens, heads,
    dim]."""
    if layout is None:
        raise TypeError("this model does not pass keyword arguments down to its attention")
    if softcap is not None or s_aux is not None:
        raise TypeError("attention with a logit cap or with sinks is not carried by the slot cache")
    n = layout.decoding
    parts = []
    if n:
        parts.append(_decode(query[0, :, :n], layout, scaling, sliding_window))
    if layout.fed:
        own = (key[0, :, n:], value[0, :, n:])
        parts.append(_feed(query[0, :, n:], own, layout, scaling, sliding_window))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


def _decode(query: torch.Tensor, layout: Layout, scaling: float | None, sliding: int | None) -> torch.Tensor:
    """query [heads, n, dim]; out [n, heads, dim]. Query heads are grouped instead of repeating the keys."""
    keys, values = layout.cache.decode_keys()
    heads, n, dim = query.shape
    grouped = query.transpose(0, 1).reshape(n, keys.shape[1], heads // keys.shape[1], dim)
    mask = layout.decode_mask(_effective(sliding, layout.decode_keys))
    out = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling)
    return out.reshape(n, heads, out.shape[-1])


def _feed(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    scaling: float | None,
    sliding: int | None,
) -> torch.Tensor:
    """query [heads, fed * width, dim]; out [fed * width, heads, dim]."""
    rows, width = layout.fed, layout.width
    heads, _, dim = query.shape
    query = query.reshape(heads, rows, width, dim).transpose(0, 1)
    if layout.fresh:
        keys, values = (x.reshape(x.shape[0], rows, width, x.shape[-1]).transpose(0, 1) for x in own)
    else:
        keys, values = layout.cache.fed_keys()
    groups = heads // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    sliding = _effective(sliding, layout.fed_keys)
    causal = layout.fresh and sliding is None
    mask = None if causal else layout.fed_mask(sliding)
    out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, is_causal=causal)
    return out.transpose(1, 2).reshape(rows * width, heads, out.shape[-1])


def _effective(sliding: int | None, num_keys: int) -> int | None:
    """A window at least as wide as all keys is none."""
    return None if sliding is None or sliding >= num_keys else sliding


def register() -> None:
    """Make `NAME` known to transformers; may be called again."""
    AttentionInterface.register(NAME, attend)
