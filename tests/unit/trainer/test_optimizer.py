"""Learning rates over steps, and clipping."""

from __future__ import annotations

import pytest
import torch

from moorage.config.trainer import OptimizerConfig, ScheduleConfig
from moorage.trainer.optimizer import clip_gradients, learning_rate


def _rates(steps: int, **schedule) -> list[float]:
    return [
        learning_rate(s, steps, OptimizerConfig(lr=1.0), ScheduleConfig(**schedule))
        for s in range(1, steps + 1)
    ]


def test_warm_up_rises_from_above_zero_to_the_full_rate() -> None:
    assert _rates(6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_falls_to_the_final_share_at_the_last_step() -> None:
    rates = _rates(11, type="linear", final_ratio=0.1)
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = _rates(11, type="cosine")
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.0)


def test_a_run_of_one_step_trains_at_the_full_rate() -> None:
    assert _rates(1, type="linear", final_ratio=0.1) == [1.0]


def test_gradients_are_scaled_to_the_norm_and_the_norm_before_is_returned() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 1.0) == pytest.approx(5.0)
    assert parameter.grad.norm() == pytest.approx(1.0, abs=1e-5)
