"""The algorithm of the random-rewards control: GRPO on rewards that have nothing to do with the answers."""

from __future__ import annotations

import random

from moorage.orchestrator.algorithms.base import ScoredGroup
from moorage.orchestrator.algorithms.grpo import Grpo, centered
from moorage.orchestrator.credit import CreditTable


class RandomGrpo(Grpo):
    """GRPO whose rewards are drawn at random; the logged reward stays the real one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def score_group(self, group: ScoredGroup, credit: CreditTable) -> None:
        traces = list(group.traces)
        rewards = [self._rng.random() for _ in traces]
        for trace, advantage in zip(traces, centered(rewards), strict=True):
            credit.assign(trace, advantage)
