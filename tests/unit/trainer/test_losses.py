"""Losses: values and gradients against formulas written out here, and the registry."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.core.errors import ConfigError
from moorage.trainer.losses import LossInputs, LossOutput, make_loss
from moorage.trainer.losses.base import capped_ratio, mismatch_kl, probability_gap


def _inputs(logprobs, engine, advantages, weights=None) -> LossInputs:
    own = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    n = len(logprobs)
    return LossInputs(
        own,
        torch.tensor(engine, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights or [1.0] * n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.long),
    )


def _run(loss, inputs: LossInputs) -> tuple[float, torch.Tensor, LossOutput]:
    output = loss(inputs)
    output.total.backward()
    return float(output.total.detach()), inputs.logprobs.grad, output


def test_ipo_keeps_tokens_inside_the_band_and_weighs_by_the_ratio() -> None:
    p, q = [0.5, 0.9, 0.2], [0.4, 0.5, 0.45]
    inputs = _inputs([math.log(x) for x in p], [math.log(x) for x in q], [2.0, 1.0, -1.0], [0.5, 1.0, 1.0])
    value, grad, output = _run(make_loss({"type": "ipo", "eps": 0.3}), inputs)
    # token 1 moved by 0.4 > 0.3: masked. -A w r: -(2 * 0.5 * 1.25) - (-1 * 0.2 / 0.45)
    assert value == pytest.approx(-1.25 + 0.2 / 0.45)
    assert grad.tolist() == pytest.approx([-1.25, 0.0, 0.2 / 0.45])
    assert output.metrics["loss/is_masked"].tolist() == [0.0, 1.0, 0.0]


def test_ipo_caps_the_value_of_the_ratio_and_lets_the_gradient_through() -> None:
    inputs = _inputs([math.log(0.1)], [math.log(1e-7)], [1.0])
    value, grad, _ = _run(make_loss({"type": "ipo", "max_importance_ratio": 100.0}), inputs)
    assert value == pytest.approx(-100.0)
    assert float(grad[0]) == pytest.approx(-100.0)


def test_a_ratio_that_overflows_outside_the_band_leaks_nothing() -> None:
    inputs = _inputs([0.0, math.log(0.5)], [-1e6, math.log(0.5)], [1.0, 1.0])
    value, grad, _ = _run(make_loss({"type": "ipo"}), inputs)
    assert value == pytest.approx(-1.0)
    assert grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_ppo_clips_only_what_goes_too_far(
    ratio: float, advantage: float, expected: float, gradient: float
) -> None:
    inputs = _inputs([math.log(0.3 * ratio)], [math.log(0.3)], [advantage])
    value, grad, output = _run(make_loss({"type": "ppo"}), inputs)
    assert value == pytest.approx(expected)
    assert float(grad[0]) == pytest.approx(gradient)
    assert bool(output.metrics["loss/is_clipped"][0]) == (gradient == 0.0)


@settings(deadline=None)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_the_probability_gap_is_the_difference_without_cancellation(logp: float, logq: float) -> None:
    gap = probability_gap(torch.tensor(logp, dtype=torch.float64), torch.tensor(logq, dtype=torch.float64))
    assert float(gap) == pytest.approx(math.exp(logp) - math.exp(logq), rel=1e-9, abs=1e-16)


@settings(deadline=None)
@given(st.floats(-200, 200))
def test_mismatch_kl_is_never_negative_and_never_infinite(log_ratio: float) -> None:
    value = float(mismatch_kl(torch.tensor(log_ratio)))
    assert 0 <= value < 1e31


def test_the_capped_ratio_has_the_value_as_gradient() -> None:
    log_ratio = torch.tensor([0.5, 50.0], dtype=torch.float64, requires_grad=True)
    ratio = capped_ratio(log_ratio, 1e4)
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(0.5), 1e4])
    assert log_ratio.grad.tolist() == pytest.approx([math.exp(0.5), 1e4])


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """A user's loss, found by its import path."""

    scale: float = 1.0
    metric_names = ()

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-(self.scale * inputs.advantages * inputs.weights * inputs.logprobs).sum())


def test_a_loss_is_found_by_import_path() -> None:
    loss = make_loss({"type": "tests.unit.trainer.test_losses:Reinforce", "scale": 2.0})
    value, grad, _ = _run(loss, _inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 0.5]))
    assert value == pytest.approx(2.0 * (1.0 + 1.0))
    assert grad.tolist() == [-2.0, -1.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "needs a `type`"),
        ({"type": "ipoo"}, "did you mean `ipo`"),
        ({"type": "ipo", "epsilon": 0.1}, "did you mean `eps`"),
        ({"type": "ipo", "eps": 2.0}, "between 0 and 1"),
        ({"type": "ppo", "ratio_low": 1.5}, "does not hold 1"),
        ({"type": "no.such.Loss"}, "cannot be imported"),
        ({"type": "moorage.trainer.losses.Nothing"}, "has no 'Nothing'"),
    ],
)
def test_a_wrong_loss_is_refused_with_the_remedy(table: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss(table)
