"""A policy loss that writes down what it was given: a batch as the trainer process itself sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moorage.trainer.losses.base import LossInputs, LossOutput


@dataclass(frozen=True)
class RecordingLoss:
    """Plain policy gradient; appends the engine's log-probabilities, as float32 bytes, to `path`."""

    path: str
    metric_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, inputs: LossInputs) -> LossOutput:
        with Path(self.path).open("ab") as file:
            file.write(inputs.engine_logprobs.float().numpy().tobytes())
        return LossOutput(-(inputs.advantages * inputs.logprobs).sum())
