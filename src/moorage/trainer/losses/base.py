"""What every policy loss receives and returns.

A loss sees member tokens only (gathered before it is called), all of one micro batch, in packing order; it
returns a sum, never a mean: the step divides by the weight of the whole step over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch


@dataclass(frozen=True)
class LossInputs:
    """N member tokens. All tensors are [N], float, and finite but for what the model itself produced.

    `logprobs` (of the trainer; carries the gradient), `engine_logprobs` (when the token was sampled),
    `advantages`, `weights` (of the rl stream), `sequence` (int64: which packed sequence a token belongs to).
    """

    logprobs: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor


@dataclass(frozen=True)
class LossOutput:
    """`total`: summed loss (scalar). `metrics`: name to one detached number per member token [N]."""

    total: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """A policy loss. `metric_names` are reported every step, also by a rank that has no member token."""

    metric_names: ClassVar[tuple[str, ...]]

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


def mismatch_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Per token `expm1(lr) - lr` >= 0: an estimate of KL(engine || trainer); at most about 1e30."""
    log_ratio = log_ratio.detach().clamp(max=69.0)
    return torch.expm1(log_ratio) - log_ratio


def capped_ratio(log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """`min(exp(lr), cap)` whose gradient still flows as value times d(lr), above the cap too."""
    limit = torch.log(torch.tensor(cap, dtype=log_ratio.dtype, device=log_ratio.device))
    value = torch.exp(torch.minimum(log_ratio.detach(), limit))
    return value * (1.0 + log_ratio - log_ratio.detach())


def probability_gap(logprobs: torch.Tensor, engine_logprobs: torch.Tensor) -> torch.Tensor:
    """`p - q` without cancellation: `sign * max(p, q) * (1 - exp(min - max))`."""
    p, q = logprobs.detach(), engine_logprobs
    high, low = torch.maximum(p, q), torch.minimum(p, q)
    return torch.sign(p - q) * torch.exp(high) * -torch.expm1(low - high)
