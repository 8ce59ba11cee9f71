"""Attention over the slot cache, registered with transformers under `NAME`.

A model whose attention implementation is `NAME` builds no masks of its own; it hands queries, the keys and
values that the cache returned, and the `Window` that the runner passed to its forward, down to `attend`.
Sliding windows are applied here, from the window that the layer itself names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "moorage_slots"


@dataclass(slots=True)
class Window:
    """Where the queries of one forward stand.

    `positions` [rows, queries]: position of each query. `num_keys`: keys per row that the cache returns, key j at
    position j. `causal`: the keys are the queries' own, from position 0, so no mask is needed.
    """

    positions: torch.Tensor
    num_keys: int
    causal: bool
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, sliding: int | None) -> torch.Tensor:
        """bool [rows, 1, queries, keys], True where a query may look; made once per window size."""
        if sliding not in self._masks:
            keys = torch.arange(self.num_keys, device=self.positions.device)
            at = self.positions[:, None, :, None]
            allowed = keys <= at
            if sliding is not None:
                allowed = allowed & (keys > at - sliding)
            self._masks[sliding] = allowed
        return self._masks[sliding]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [rows, heads, queries, dim]; key and value [rows, kv heads, keys, dim]; out [rows, queries, heads, dim]."""
    if window is None:
        raise TypeError("this model does not pass keyword arguments down to its attention")
    if softcap is not None or s_aux is not None:
        raise TypeError("attention with a logit cap or with sinks is not carried by the slot cache")
    if sliding_window is not None and sliding_window >= window.num_keys:
        sliding_window = None
    rows, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    causal = window.causal and sliding_window is None
    if queries == 1 and not causal:  # group the query heads instead of repeating the keys
        query = query.view(rows, key.shape[1], groups, dim)
        out = F.scaled_dot_product_attention(query, key, value, window.mask(sliding_window), scale=scaling)
        return out.view(rows, 1, heads, out.shape[-1]), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = None if causal else window.mask(sliding_window)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, is_causal=causal)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` known to transformers; may be called again."""
    AttentionInterface.register(NAME, attend)
