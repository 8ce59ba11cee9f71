"""Group-relative credit: a trace's reward against the mean of its group, and the variants of that baseline.

Baselines are over the surviving traces of the group only, wherever they lie; a single survivor gets 0; equal
rewards get exactly 0. No division by the standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.v1 import WireEpisode

from moorage.core.errors import ConfigError
from moorage.orchestrator.algorithms.base import ScoredGroup
from moorage.orchestrator.credit import CreditTable


class Grpo:
    """`A_i = R_i - mean(R)`, optionally with a linear length penalty.

    With `length_penalty`, and m = mean(R):
    `R'_i = R_i - m * (output * out_i / max(out) + input * in_i / max(in) + turns * t_i / max(t))`, and
    `A_i = R'_i - mean(R')`; the maxima are over the group. A mean reward of 0 makes the penalty vanish.
    """

    def __init__(
        self, length_penalty: bool = False, output: float = 0.25, input: float = 0.1, turns: float = 0.1
    ) -> None:
        weights = (output, input, turns)
        if min(weights) < 0 or sum(weights) > 1:
            raise ConfigError(f"grpo: length weights {weights} must not be negative nor sum to more than 1")
        self.length_penalty = length_penalty
        self.weights = weights

    def score_episode(self, episode: WireEpisode, credit: CreditTable) -> None:
        """Nothing: the group decides."""

    def score_group(self, group: ScoredGroup, credit: CreditTable) -> None:
        traces = list(group.traces)
        rewards = [float(trace.reward) for trace in traces]
        if self.length_penalty:
            rewards = penalized(rewards, [lengths(trace) for trace in traces], self.weights)
        for trace, advantage in zip(traces, centered(rewards), strict=True):
            credit.assign(trace, advantage)

    def state(self) -> None:
        return None

    def restore(self, state: Any) -> None:
        """Nothing is kept between groups."""


def centered(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean; exactly 0 when all are equal, whatever the rounding of the mean."""
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def lengths(trace: Any) -> tuple[int, int, int]:
    """Output tokens, input tokens, turns. Input is counted by itself: on forked traces total minus output may
    be negative."""
    return trace.num_output_tokens, trace.num_input_tokens, trace.num_turns


def penalized(
    rewards: Sequence[float], sizes: Sequence[tuple[int, int, int]], weights: tuple[float, float, float]
) -> list[float]:
    """Rewards minus the linear length penalty (see `Grpo`)."""
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    largest = [max(max(size[i] for size in sizes), 1) for i in range(3)]
    return [
        reward - mean * sum(weights[i] * size[i] / largest[i] for i in range(3))
        for reward, size in zip(rewards, sizes, strict=True)
    ]
