"""Folders of weights that must be taken whole or refused, and models that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moorage.core.errors import ConfigError, EngineError
from moorage.engine.builtin.model import Runner, load_runner, pick_device
from moorage.engine.builtin.weights import model_tensors
from tests.unit.engine.builtin import reference as ref


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = ref.make_folder(tmp_path_factory.mktemp("served") / "model", "qwen3", tie_word_embeddings=True)
    return load_runner(str(folder), device="cpu", dtype="float32")


def snapshot(runner: Runner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(runner.model).items()}


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")


def tear(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def point_at_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def widen(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(49)
    save_file(tensors, folder / "model.safetensors")


def scribble_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
        (tear, "torn"),
        (drop_tensor, "model.norm.weight"),
        (widen, r"\(49,\)"),
        (point_at_a_missing_shard, "lacks model-00001-of-00002"),
        (scribble_index, "torn or not an index"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_and_nothing_changes(
    runner: Runner, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    folder = ref.make_folder(tmp_path / "new", "qwen3", seed=5, tie_word_embeddings=True)
    spoil(folder)
    before = snapshot(runner)
    with pytest.raises(EngineError, match=said):
        runner.reload(folder)
    for name, tensor in snapshot(runner).items():
        assert torch.equal(tensor, before[name])


def test_a_missing_folder_is_refused(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        runner.reload(tmp_path / "nowhere")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "olmoe"])
def test_a_reload_gives_the_weights_of_the_folder_bit_for_bit(
    tmp_path: Path, family: str, shards: int
) -> None:
    served = load_runner(str(ref.make_folder(tmp_path / "old", family)), device="cpu", dtype="float32")
    folder = ref.make_folder(tmp_path / "new", family, seed=5)
    other = ref.Reference(folder).model
    if shards > 1:
        other.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
        folder = tmp_path / "sharded"
        assert (folder / "model.safetensors.index.json").exists()
    served.reload(folder)
    expected = model_tensors(other)
    for name, tensor in model_tensors(served.model).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("gemma2", {}, "gemma2|Gemma2"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_a_model_that_the_cache_cannot_carry_is_refused(
    tmp_path: Path, family: str, more: dict, said: str
) -> None:
    ref.FAMILIES.setdefault(family, {})
    try:
        folder = ref.make_folder(tmp_path / "model", family, **more)
        with pytest.raises(ConfigError, match=said):
            load_runner(str(folder), device="cpu", dtype="float32")
    finally:
        if family == "gemma2":
            ref.FAMILIES.pop(family)


def test_a_dense_model_has_no_routing_to_report(tmp_path: Path) -> None:
    folder = ref.make_folder(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="routed_experts is on but the model has no router"):
        load_runner(str(folder), device="cpu", dtype="float32", routed_experts=True)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_runner(str(tmp_path), device="cpu", dtype="float32")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no torch device"):
        pick_device("abacus")
