"""PPO's clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from moorage.trainer.losses.base import LossInputs, LossOutput, capped_ratio


@dataclass(frozen=True)
class PPO:
    """`-w min(A r, A clip(r, ratio_low, ratio_high))`."""

    ratio_low: float = 0.8
    ratio_high: float = 1.2
    max_importance_ratio: float = 1e4
    metric_names: ClassVar[tuple[str, ...]] = ("loss/is_clipped",)

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(f"the clip range [{self.ratio_low}, {self.ratio_high}] does not hold 1")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        ratio = capped_ratio(inputs.logprobs - inputs.engine_logprobs, self.max_importance_ratio)
        advantages = inputs.advantages
        clipped = ratio.clamp(self.ratio_low, self.ratio_high)
        # loss = -w * min(A r, A clip(r))
        total = -(inputs.weights * torch.minimum(advantages * ratio, advantages * clipped)).sum()
        value = ratio.detach()
        # The clip bites only where it stops the update: above for A > 0, below for A < 0.
        bites = ((advantages > 0) & (value > self.ratio_high)) | ((advantages < 0) & (value < self.ratio_low))
        return LossOutput(total, {"loss/is_clipped": bites.to(torch.float32)})
