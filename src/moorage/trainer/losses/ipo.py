"""IPO, the default: policy gradient inside an absolute trust band on the token's probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from moorage.trainer.losses.base import LossInputs, LossOutput, capped_ratio, probability_gap


@dataclass(frozen=True)
class IPO:
    """`-tau A w min(r, cap)` on tokens with `|p - q| <= eps`; tokens outside train nothing.

    The band is absolute, so a rare token may move by a large ratio and a likely one may not. The denominator
    stays that of all member tokens.
    """

    eps: float = 0.3
    adv_tau: float = 1.0
    max_importance_ratio: float = 1e4
    metric_names: ClassVar[tuple[str, ...]] = ("loss/is_masked",)

    def __post_init__(self) -> None:
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps is a probability gap between 0 and 1, got {self.eps}")
        if self.max_importance_ratio < 1:
            raise ValueError(f"max_importance_ratio {self.max_importance_ratio} is below 1")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        keep = probability_gap(inputs.logprobs, inputs.engine_logprobs).abs() <= self.eps
        log_ratio = (inputs.logprobs - inputs.engine_logprobs)[keep]
        ratio = capped_ratio(log_ratio, self.max_importance_ratio)
        # loss = -tau * A * w * min(r, cap)
        total = -(self.adv_tau * inputs.advantages[keep] * inputs.weights[keep] * ratio).sum()
        return LossOutput(total, {"loss/is_masked": (~keep).to(torch.float32)})
