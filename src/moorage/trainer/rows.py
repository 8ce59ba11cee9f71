"""One micro batch as tensors: a packed row, and which of its tokens train what.

Owns the choice of member tokens, made once on the CPU before any arithmetic:
- rl: `loss_mask` is 1 and the rl weight is not 0, and the engine's log-probability is a number;
- ce: the ce weight is not 0 (the mask is not asked: observations may be trained);
- the first token of a sequence has nothing before it that predicts it and is never a member.

Everything else of the row is context: its log-probabilities are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moorage.core.errors import ExchangeError
from moorage.payload.assemble import Assembled
from moorage.trainer.attention import PackedLayout, make_layout
from moorage.trainer.logprobs import KeptSets


@dataclass(frozen=True)
class Row:
    """A packed row of T tokens, of which N are computed; R of those are rl members, C are ce members.

    `rows` [N]: positions whose logits predict `labels` [N]. `rl`, `ce`: indices into the N. `sequence` [N]:
    which sequence a token belongs to. Without any member one token is computed and trains nothing, so that
    every rank has a backward pass.
    """

    token_ids: torch.Tensor
    layout: PackedLayout
    rows: torch.Tensor
    labels: torch.Tensor
    temperatures: torch.Tensor
    sequence: torch.Tensor
    kept: KeptSets | None
    routing: torch.Tensor | None
    rl: torch.Tensor
    advantages: torch.Tensor
    rl_weights: torch.Tensor
    engine_logprobs: torch.Tensor
    ce: torch.Tensor
    ce_weights: torch.Tensor
    dropped: bool
    num_unusable: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())


def float_dtype(model_dtype: str) -> torch.dtype:
    """Dtype of advantages, weights and log-probabilities for a model of this dtype."""
    return torch.float64 if model_dtype == "float64" else torch.float32


def make_row(arrays: Assembled, dtype: torch.dtype, device: torch.device, *, replay: bool) -> Row:
    """Tensors of one assembled micro batch. Floats become `dtype` (float32, or float64 for a float64 model).

    Raises ExchangeError on a sample that cannot be trained as it was sent.
    """
    members = _members(arrays)
    chosen = np.flatnonzero(members.rl | members.ce)
    anchor = len(chosen) == 0
    if anchor:
        chosen = np.array([min(1, len(arrays.token_ids) - 1)])
    is_rl, is_ce = members.rl[chosen] & (not anchor), members.ce[chosen] & (not anchor)
    _check_samples(arrays, chosen[is_rl])

    def floats(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    def ints(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    seq_lens = [int(n) for n in arrays.seq_lens]
    return Row(
        token_ids=ints(arrays.token_ids),
        layout=make_layout(seq_lens, device),
        rows=ints(np.maximum(chosen - 1, 0)),
        labels=ints(arrays.token_ids[chosen]),
        temperatures=floats(arrays.temperatures[chosen]),
        sequence=ints(np.repeat(np.arange(len(seq_lens)), seq_lens)[chosen]),
        kept=_kept_sets(arrays, chosen, device),
        routing=_routing(arrays, device) if replay else None,
        rl=ints(np.flatnonzero(is_rl)),
        advantages=floats(arrays.advantages[chosen[is_rl]]),
        rl_weights=floats(arrays.rl_weights[chosen[is_rl]]),
        engine_logprobs=floats(arrays.logprobs[chosen[is_rl]]),
        ce=ints(np.flatnonzero(is_ce)),
        ce_weights=floats(arrays.ce_weights[chosen[is_ce]]),
        dropped=arrays.dropped,
        num_unusable=members.num_unusable,
    )


@dataclass(frozen=True)
class _Members:
    rl: np.ndarray
    ce: np.ndarray
    num_unusable: int


def _members(arrays: Assembled) -> _Members:
    first = np.zeros(len(arrays.token_ids), dtype=bool)
    ends = np.cumsum(arrays.seq_lens)
    first[np.concatenate(([0], ends[:-1])).astype(np.int64)] = True
    if arrays.dropped:
        nothing = np.zeros_like(first)
        return _Members(nothing, nothing, 0)
    wanted = arrays.loss_mask.astype(bool) & (arrays.rl_weights != 0) & ~first
    usable = np.isfinite(arrays.logprobs)
    if bool(((arrays.ref_kl_weights != 0) & ~first).any()):
        raise ExchangeError(
            "the batch asks for reference KL, but no reference log-probabilities came with it"
        )
    return _Members(wanted & usable, (arrays.ce_weights != 0) & ~first, int((wanted & ~usable).sum()))


def _check_samples(arrays: Assembled, rl: np.ndarray) -> None:
    if not np.isfinite(arrays.advantages[rl]).all():
        raise ExchangeError("a trained token has no advantage: the algorithm assigned none to its node")
    if (arrays.temperatures[rl] <= 0).any():
        raise ExchangeError(
            "a trained sample was drawn at temperature 0, which has no probability to compare with; set "
            "orchestrator.sampling.temperature above 0"
        )


def _kept_sets(arrays: Assembled, chosen: np.ndarray, device: torch.device) -> KeptSets | None:
    if arrays.sampling is None:
        return None
    counts, ids = (torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in arrays.sampling)
    kept = KeptSets.from_ragged(counts, ids, torch.from_numpy(chosen))
    return None if kept is None else KeptSets(kept.ids.to(device))


def _routing(arrays: Assembled, device: torch.device) -> torch.Tensor | None:
    if arrays.routed_experts is None:
        return None
    rows = np.array(arrays.routed_experts, dtype=np.int32)
    # The engine never fed a sequence's last token, so its row may be a placeholder; it predicts nothing here.
    rows[np.cumsum(arrays.seq_lens) - 1] = -1
    return torch.from_numpy(rows).to(device)
