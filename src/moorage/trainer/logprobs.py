"""From logits to what a loss needs: log-probability and entropy of chosen tokens.

Owns the order of operations, which must be the engine's: divide by temperature, then (when sampling was
truncated) renormalise over the kept set, then take the logarithm.

Promises: only the asked rows are computed ("select before arithmetic"), so NaN or infinity anywhere else
cannot reach a value or a gradient. Does not know: packing, losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptSets:
    """Kept sets of truncated sampling for N rows: `ids` int64 [N, widest], padded with -1."""

    ids: torch.Tensor

    @staticmethod
    def from_ragged(counts: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> KeptSets | None:
        """Of `counts` [T] and flat `ids` [sum counts], those of `rows` [N]; None when they are all empty."""
        own = counts[rows].long()
        widest = int(own.max()) if own.numel() else 0
        if widest == 0:
            return None
        starts = (counts.long().cumsum(0) - counts)[rows]
        column = torch.arange(widest, device=ids.device)
        inside = column[None, :] < own[:, None]
        at = (starts[:, None] + column[None, :]).clamp(max=ids.numel() - 1)
        return KeptSets(torch.where(inside, ids.long()[at], -1))


def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    kept: KeptSets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [N] of `labels` [N], entropy [N] (detached), of `logits` [N, V] / `temperatures` [N].

    With a kept set that holds the label the probability is renormalised over the set:
    `log p = z_label - logsumexp_{v in K} z_v`, z = logits / temperature; otherwise, and for the entropy
    always, over the whole vocabulary.
    """
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    scaled = wide / temperatures[:, None].to(wide.dtype)
    normaliser = torch.logsumexp(scaled, -1)
    chosen = scaled.gather(-1, labels[:, None]).squeeze(-1)
    with torch.no_grad():
        logp = scaled - normaliser[:, None]
        entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    if kept is not None:
        normaliser = _kept_normaliser(scaled, labels, kept, normaliser)
    return chosen - normaliser, entropy


def _kept_normaliser(
    scaled: torch.Tensor, labels: torch.Tensor, kept: KeptSets, full: torch.Tensor
) -> torch.Tensor:
    inside = kept.ids >= 0
    usable = ((kept.ids == labels[:, None]) & inside).any(-1)
    # Rows without a usable set gather finite zeros first: a `where` alone would send NaN back through them.
    rows = torch.nonzero(usable).squeeze(-1)
    if rows.numel() == 0:
        return full
    values = scaled[rows].gather(-1, kept.ids[rows].clamp(min=0))
    values = values.masked_fill(~inside[rows], float("-inf"))
    return full.index_copy(0, rows, torch.logsumexp(values, -1))
