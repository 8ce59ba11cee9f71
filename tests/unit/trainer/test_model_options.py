"""Options of the trainer's model that cannot work are refused before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError
from moorage.trainer.model import load_model
from moorage.trainer.world import World


def test_compiling_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"no_compiler.*trainer.compile = false"):
        load_model(ModelConfig(path=str(tmp_path)), TrainerConfig(compile=True, device="cpu"), world, 64)
