# ruff: noqa: ARG002 - scripted partners take what the real ones take
from __future__ import annotations

import math

import pytest

from moorage.core.errors import ConfigError
from moorage.orchestrator.algorithms.base import ScoredGroup
from moorage.orchestrator.algorithms.grpo import Grpo, centered, penalized
from moorage.orchestrator.algorithms.registry import resolve_algorithm
from moorage.orchestrator.credit import CreditTable, NodeCredit, is_flat, read_advantage
from tests.unit.orchestrator.scripted import Says, make_episode, make_task


def score(rewards: list[float], survivors: int | None = None, **options) -> dict[str, float | None]:
    """GRPO over one group of single-trace episodes; by position: the trace's advantage."""
    episodes = [make_episode([Says(reward=reward)], make_task(0), None) for reward in rewards]
    traces = [episode.traces[0] for episode in episodes]
    alive = frozenset(trace.id for trace in traces[:survivors])
    credit = CreditTable()
    Grpo(**options).score_group(ScoredGroup("g", "s", episodes, alive), credit)
    return {at: read_advantage(credit.of(trace.id)) for at, trace in enumerate(traces)}


def test_a_trace_is_compared_with_the_mean_of_its_group():
    assert score([1.0, 0.0, 0.5, 0.5]) == {0: 0.5, 1: -0.5, 2: 0.0, 3: 0.0}


def test_equal_rewards_give_exactly_zero_whatever_the_rounding():
    assert set(score([0.1] * 3).values()) == {0.0}
    assert set(score([1 / 3] * 7).values()) == {0.0}


def test_a_lone_survivor_gets_zero_and_who_failed_gets_nothing():
    assert score([1.0, 0.0, 0.0], survivors=1) == {0: 0.0, 1: None, 2: None}


def test_credit_lands_on_every_sampled_node_and_on_no_other():
    episode = make_episode([Says(reward=1.0, branches=3)], make_task(0), None)
    credit = CreditTable()
    credit.assign(episode.traces[0], 0.25)
    assert credit.of(episode.traces[0].id) == {at: NodeCredit(0.25) for at in (1, 2, 3)}
    assert all(node.advantages is None for node in episode.traces[0].nodes)


def test_the_length_penalty_vanishes_at_mean_zero_and_follows_the_formula():
    sizes = [(10, 4, 1), (5, 4, 2)]
    assert penalized([-1.0, 1.0], sizes, (0.25, 0.1, 0.1)) == [-1.0, 1.0]
    got = penalized([1.0, 0.5], sizes, (0.25, 0.1, 0.1))
    assert got == pytest.approx([1.0 - 0.75 * (0.25 + 0.1 + 0.05), 0.5 - 0.75 * (0.125 + 0.1 + 0.1)])


def test_length_weights_that_sum_above_one_are_refused():
    with pytest.raises(ConfigError, match="length weights"):
        Grpo(length_penalty=True, output=0.9, input=0.2)


def test_an_infinite_advantage_is_refused():
    episode = make_episode([Says()], make_task(0), None)
    with pytest.raises(ValueError, match="not a finite number"):
        CreditTable().assign(episode.traces[0], math.inf)


def test_unassigned_is_not_zero():
    assert read_advantage({}) is None
    assert read_advantage({1: NodeCredit(None, ce=1.0)}) is None
    assert read_advantage({1: NodeCredit(0.0)}) == 0.0
    assert read_advantage({1: NodeCredit(0.0), 2: NodeCredit(0.5), 3: NodeCredit(-0.1)}) == pytest.approx(0.2)
    assert not is_flat({})
    assert is_flat({1: NodeCredit(0.0)})
    assert not is_flat({1: NodeCredit(0.0, ce=0.1)})


def test_centering_keeps_the_sum_at_zero():
    assert sum(centered([0.3, 0.9, 0.1])) == pytest.approx(0.0)
    assert centered([]) == []


class HalfReward:
    """A user's algorithm."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def score_episode(self, episode, credit):
        return None

    def score_group(self, group, credit):
        for trace in group.traces:
            credit.assign(trace, self.factor * trace.reward)

    def state(self):
        return {"factor": self.factor}

    def restore(self, state):
        self.factor = state["factor"]


class Unfinished:
    """Lacks the hooks."""


def test_a_user_algorithm_is_named_by_import_path_with_its_options():
    path = f"{__name__}:HalfReward"
    algorithm = resolve_algorithm({"type": path, "factor": 0.5})
    assert algorithm.state() == {"factor": 0.5}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "needs a `type`"),
        ({"type": "grp"}, "valid: grpo"),
        ({"type": "grpo", "factor": 1}, "options: length_penalty"),
        ({"type": "no_such_package.x:Y"}, "cannot be imported"),
        ({"type": f"{__name__}:Unfinished"}, "lacks score_episode"),
        ({"type": f"{__name__}:score"}, "no class"),
    ],
)
def test_an_algorithm_that_cannot_be_made_says_why(table, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm(table)
