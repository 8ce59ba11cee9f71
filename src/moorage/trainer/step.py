"""One optimizer step over a data rank's rows.

Loss of a step: `RL / N_rl + CE / N_ce`, summed over all ranks and micro batches, where N_rl is the sum of rl
weights and N_ce the number of ce tokens **of the whole step over all ranks**. So the split into micro batches
and ranks cannot change the gradient.

Order: rows are final (failed fetches are agreed on) -> one all-reduce of the divisors -> forward and backward
per row, the same number on every rank -> clip over shards -> stop on a loss or norm that is not finite ->
optimizer. FSDP sums gradients here, it does not average them (`sharding`), so nothing is rescaled afterwards.

Promises: weights change only by finite gradients of a finite loss, so no others are published or saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moorage.config.trainer import TrainerConfig
from moorage.core.errors import RunEnded, TrainingError
from moorage.trainer.logprobs import token_logprobs
from moorage.trainer.losses import LossInputs, PolicyLoss
from moorage.trainer.losses.base import mismatch_kl
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.model import TrainedModel
from moorage.trainer.optimizer import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from moorage.trainer.rows import Row
from moorage.trainer.world import World


@dataclass(frozen=True)
class Divisors:
    """What the summed losses of a step are divided by."""

    rl: float
    ce: float


class TrainStep:
    """Holds the optimizer; `run` makes one step."""

    def __init__(self, model: TrainedModel, loss: PolicyLoss, config: TrainerConfig, max_steps: int) -> None:
        self.model = model
        self.loss = loss
        self.config = config
        self.max_steps = max_steps
        self.optimizer = make_optimizer(model.parameters(), config.optimizer)

    def run(self, step: int, rows: Sequence[Row], metrics: StepMetrics) -> None:
        """Train on `rows` as step `step`; adds what it measured to `metrics`. Collective.

        Raises TrainingError on the main rank and RunEnded on the others, before any weight changes, when the
        loss or the gradient norm over all ranks is not finite.
        """
        started = time.perf_counter()
        rate = learning_rate(step, self.max_steps, self.config.optimizer, self.config.schedule)
        set_learning_rate(self.optimizer, rate)
        self.backward(rows, metrics)
        norm = clip_gradients(self.model.parameters(), self.config.optimizer.max_grad_norm)
        require_finite(step, metrics.own_sum("loss"), norm, self.model.world)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics.put("optim/lr", rate)
        metrics.put("optim/grad_norm", norm)
        metrics.put("time/forward_backward", time.perf_counter() - started)

    def backward(self, rows: Sequence[Row], metrics: StepMetrics) -> None:
        """Gradients of the step's loss, summed over ranks. Collective."""
        divisors = agree_divisors(rows, self.model)
        for number, row in enumerate(rows):
            self.model.set_last_row(number == len(rows) - 1)
            with self.model.row(row.layout, row.routing):
                total = self._row_loss(row, divisors, metrics)
                total.backward()
            self._measure_routing(row, metrics)

    def _row_loss(self, row: Row, divisors: Divisors, metrics: StepMetrics) -> torch.Tensor:
        logits = self.model.logits(row.token_ids, row.layout, row.rows)
        logprobs, entropy = token_logprobs(logits, row.labels, row.temperatures, row.kept)
        # Every rank runs a backward pass; a row without members gets one whose gradients are all zero.
        total = torch.nan_to_num(logprobs).sum() * 0.0
        if row.rl.numel():
            total = total + self._policy_loss(row, logprobs, entropy, metrics) / divisors.rl
        if row.ce.numel():
            nll = -logprobs[row.ce]
            metrics.add_mean("ce/nll", nll.detach())
            total = total + (row.ce_weights * nll).sum() / divisors.ce  # CE = sum w * -log p
        metrics.add_sum("loss", float(total.detach()))
        return total

    def _policy_loss(
        self, row: Row, logprobs: torch.Tensor, entropy: torch.Tensor, metrics: StepMetrics
    ) -> torch.Tensor:
        own = logprobs[row.rl]
        inputs = LossInputs(own, row.engine_logprobs, row.advantages, row.rl_weights, row.sequence[row.rl])
        output = self.loss(inputs)
        log_ratio = own.detach() - row.engine_logprobs
        metrics.add_mean("mismatch_kl", mismatch_kl(log_ratio), with_max=True)
        metrics.add_mean("logprob_gap", log_ratio.abs(), with_max=True)
        metrics.add_mean("entropy", entropy[row.rl])
        metrics.add_mean("importance_ratio", log_ratio.clamp(max=30.0).exp(), with_max=True)
        for name in self.loss.metric_names:
            metrics.add_mean(name, output.metrics[name])
        return output.total

    def _measure_routing(self, row: Row, metrics: StepMetrics) -> None:
        replay = self.model.replay
        if replay is None or row.routing is None or row.dropped:
            return
        metrics.put_max("routing/imbalance", replay.imbalance())


def require_finite(step: int, own_loss: float, norm: float, world: World) -> None:
    """Raise on every rank unless the loss summed over ranks and the gradient norm are finite. Collective.

    `norm` is the same on every rank. The main rank raises TrainingError, the others RunEnded.
    """
    loss = float(world.all_reduce(torch.tensor([own_loss], dtype=torch.float64))[0])
    if math.isfinite(loss) and math.isfinite(norm):
        return
    if not world.is_main:
        raise RunEnded(f"step {step}: the loss or the gradient is not finite, as the main rank says")
    raise TrainingError(
        f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; both must be finite. Nothing of "
        "this step was applied, published or saved. Start again, from the last checkpoint where there is "
        "one, with a lower optimizer.lr, a smaller optimizer.max_grad_norm or a wider dtype; if that does "
        "not help, look for extreme advantages or weights in the batch"
    )


def agree_divisors(rows: Sequence[Row], model: TrainedModel) -> Divisors:
    """One all-reduce of the summed rl weights and the number of ce tokens; 1 where there are none."""
    own = torch.zeros(2, dtype=torch.float64)
    for row in rows:
        own[0] += float(row.rl_weights.double().sum())
        own[1] += row.ce.numel()
    total = model.world.all_reduce(own)
    rl, ce = float(total[0]), float(total[1])
    return Divisors(rl if rl > 0 else 1.0, ce if ce > 0 else 1.0)
