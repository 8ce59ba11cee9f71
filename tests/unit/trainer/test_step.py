"""A step is applied whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import RunEnded, TrainingError
from moorage.payload.assemble import assemble
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, Span, TrainSample
from moorage.trainer.export import Exporter
from moorage.trainer.losses.base import LossInputs, LossOutput
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.model import load_model
from moorage.trainer.rows import Row, make_row
from moorage.trainer.starter import make_model_folder
from moorage.trainer.step import TrainStep, require_finite
from moorage.trainer.world import World
from tests.support.training import make_arrays
from tests.unit.trainer.models import make_model

ALONE = World(0, 1, torch.device("cpu"))
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Shifted:
    """Policy gradient plus a constant, which has no gradient."""

    constant: float
    metric_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(self.constant - (inputs.advantages * inputs.logprobs).sum())


def _row(advantage: float) -> Row:
    arrays = make_arrays(np.random.default_rng(0), 12)
    arrays.token_ids[:] %= 96
    piece = PayloadSlice("", "", "a", 12, 12, tuple(arrays.present()), None, 0)
    micro = MicroBatch((TrainSample(piece, (Span(0, 12, advantage),), env="e"),))
    return make_row(assemble(micro, {"a": arrays}), torch.float32, ALONE.device, replay=False)


@pytest.mark.parametrize(
    ("advantage", "constant", "named"),
    [(1.0, NAN, "loss is nan"), (1.0, INF, "loss is inf"), (3e38, 0.0, r"gradient norm (inf|nan)")],
)
def test_a_step_whose_loss_or_gradient_is_no_number_changes_no_weight(
    advantage: float, constant: float, named: str
) -> None:
    model = make_model("qwen3")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = TrainStep(model, Shifted(constant), TrainerConfig(device="cpu"), 10)
    with pytest.raises(TrainingError, match=f"step 7: .*{named}"):
        step.run(7, [_row(advantage)], StepMetrics())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert not step.optimizer.state
    step = TrainStep(model, Shifted(0.0), TrainerConfig(device="cpu"), 10)
    step.optimizer.zero_grad()
    step.run(7, [_row(1.0)], StepMetrics())
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_weights_that_became_no_numbers_are_not_exported(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", overrides={"tie_word_embeddings": False})
    config = TrainerConfig.model_validate({"device": "cpu", "optimizer": {"lr": 1e-3, "eps": 1e-60}})
    model = load_model(ModelConfig(path=str(folder)), config, ALONE, 64)
    TrainStep(model, Shifted(0.0), config, 10).run(1, [_row(1.0)], StepMetrics())  # 0 / 0 for unseen tokens
    (tmp_path / "out").mkdir()
    with pytest.raises(TrainingError, match=r"parameter model.embed_tokens.weight .* larger optimizer.eps"):
        Exporter(model, folder).write(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_other_ranks_leave_the_message_to_the_main_one() -> None:
    require_finite(1, 1.0, 2.0, ALONE)
    with pytest.raises(RunEnded, match="as the main rank says"):
        require_finite(1, 1.0, NAN, World(1, 1, ALONE.device))
