"""Options of the trainer's model that cannot work are refused before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError
from moorage.trainer.model import load_model
from moorage.trainer.starter import make_model_folder
from moorage.trainer.world import World


def test_compiling_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"no_compiler.*trainer.compile = false"):
        load_model(ModelConfig(path=str(tmp_path)), TrainerConfig(compile=True, device="cpu"), world, 64)


def test_weights_that_are_no_numbers_are_refused_before_they_are_published(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="weights of its folder hold NaN or infinity"):
        load_model(
            ModelConfig(path=str(folder)), TrainerConfig(device="cpu"), World(0, 1, torch.device("cpu")), 64
        )
