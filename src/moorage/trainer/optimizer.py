"""AdamW, its learning rate as a pure function of the step, and clipping over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from moorage.config.trainer import OptimizerConfig, ScheduleConfig


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, fused on a device that has it."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    fused = all(parameter.device.type == "cuda" for parameter in trained)
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,
        foreach=None if fused else True,
    )


def learning_rate(step: int, max_steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """The learning rate of `step` (from 1).

    Warm-up: `lr * step / (warmup_steps + 1)`, so that no step has rate zero. Then constant, or linear or
    cosine from `lr` down to `lr * final_ratio` at `max_steps`.
    """
    if step <= schedule.warmup_steps:
        return optimizer.lr * step / (schedule.warmup_steps + 1)
    if schedule.type == "constant":
        return optimizer.lr
    span = max(max_steps - schedule.warmup_steps - 1, 1)
    done = min((step - schedule.warmup_steps - 1) / span, 1.0)
    shape = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (schedule.final_ratio + (1.0 - schedule.final_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to global norm `max_norm` (over all shards); returns the norm before."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(trained, max_norm, foreach=True)
    full = getattr(norm, "full_tensor", None)
    return float(full() if full is not None else norm)
