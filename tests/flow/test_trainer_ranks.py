"""Layout changes nothing: one, two and four ranks, any split into micro batches, replicas of shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moorage.engine.builtin.model import load_runner
from moorage.engine.builtin.weights import model_tensors
from tests.support.training import process_env


def _run(tmp_path: Path, model: Path, num_ranks: int, layouts: list[dict[str, Any]], **spec: Any) -> Path:
    out = tmp_path / f"ranks{num_ranks}"
    out.mkdir()
    path = out / "spec.json"
    path.write_text(
        json.dumps({"model": str(model), "out": str(out), "num_ranks": num_ranks, "layouts": layouts, **spec})
    )
    command = [sys.executable, "-m", "tests.support.rank_worker", str(path)]
    if num_ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command = [sys.executable, *torchrun, *command[1:]]
    done = subprocess.run(
        command, env=process_env(), capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def _load(out: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return load_file(out / name / "gradients.safetensors"), load_file(out / name / "parameters.safetensors")


def _compare(base: Path, other: Path, name: str) -> None:
    """Gradients of the first step within 1e-6 relative, parameters after three steps within 1e-5."""
    (gradients, parameters), (own_gradients, own_parameters) = _load(base, "whole"), _load(other, name)
    assert gradients.keys() == own_gradients.keys()
    for key, expected in gradients.items():
        scale = float(expected.abs().max())
        assert scale > 0, key
        assert float((own_gradients[key] - expected).abs().max()) / scale < 1e-6, (name, key)
        assert float((own_parameters[key] - parameters[key]).abs().max()) < 1e-5, (name, key)


def _bitwise(out: Path, one: str, two: str) -> None:
    for first, second in zip(_load(out, one), _load(out, two), strict=True):
        assert all(torch.equal(first[key], value) for key, value in second.items()), (one, two)


def _check_published(out: Path, name: str) -> None:
    """The files equal the full state dict bit for bit, and load as a model."""
    expected = load_file(out / name / "parameters.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out / name / "published", dtype="auto")
    actual = dict(loaded.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key].detach().double(), value.double()) for key, value in expected.items())


def _check_engine(start: Path, out: Path, name: str) -> None:
    """The built-in engine, running on other weights, takes the files and then holds them bit for bit."""
    expected = load_file(out / name / "parameters.safetensors")
    runner = load_runner(str(start), device="cpu", dtype="float32", routed_experts=True)
    assert not all(torch.equal(tensor, expected[key]) for key, tensor in model_tensors(runner.model).items())
    runner.reload(out / name / "published")
    held = model_tensors(runner.model)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], value) for key, value in expected.items())


def _one_rank_layouts() -> list[dict[str, Any]]:
    return [
        {"name": "whole", "micro_tokens": 4096},
        {"name": "again", "micro_tokens": 4096},
        {"name": "split", "micro_tokens": 24},
        {"name": "checkpointed", "micro_tokens": 64, "activation_checkpointing": True},
        {"name": "fsdp", "micro_tokens": 64, "fsdp": True},
    ]


def _two_rank_layouts() -> list[dict[str, Any]]:
    return [
        {"name": "shard", "micro_tokens": 64, "file_bytes": 100_000},
        {"name": "again", "micro_tokens": 64},
        {"name": "split", "micro_tokens": 24},
        {"name": "replicate", "micro_tokens": 64, "replicate": 2},
        {"name": "checkpointed", "micro_tokens": 64, "activation_checkpointing": True},
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_one_and_two_ranks_train_alike(tmp_path: Path, dense_model: Path, moe_model: Path, kind: str) -> None:
    model, routing = (dense_model, None) if kind == "dense" else (moe_model, [2, 2, 8])
    alone, together = _one_rank_layouts(), _two_rank_layouts()
    if kind == "moe":  # experts run one by one in float64: fewer layouts
        alone, together = alone[:3], together[:4]
    one = _run(tmp_path, model, 1, alone, dtype="float64", routing=routing)
    for layout in alone[1:]:
        _compare(one, one, layout["name"])
    _bitwise(one, "whole", "again")
    two = _run(tmp_path, model, 2, together, dtype="float64", routing=routing)
    for layout in together:
        _compare(one, two, layout["name"])
        _check_published(two, layout["name"])
    _bitwise(two, "shard", "again")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_ranks_and_replicas_of_shards_train_alike(tmp_path: Path, dense_model: Path) -> None:
    one = _run(tmp_path, dense_model, 1, _one_rank_layouts()[:1], dtype="float64")
    layouts = [
        {"name": "shard", "micro_tokens": 64},
        {"name": "hybrid", "micro_tokens": 24, "replicate": 2},
        {"name": "again", "micro_tokens": 24, "replicate": 2},
    ]
    four = _run(tmp_path, dense_model, 4, layouts, dtype="float64")
    for layout in layouts:
        _compare(one, four, layout["name"])
    _bitwise(four, "hybrid", "again")
    _check_published(four, "hybrid")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=pytest.mark.proof), pytest.param("moe", marks=pytest.mark.slow)]
)
def test_compiled_blocks_train_alike(tmp_path: Path, dense_model: Path, moe_model: Path, kind: str) -> None:
    layouts = [
        {"name": "whole", "micro_tokens": 64},
        {"name": "compiled", "micro_tokens": 64, "compile": True},
    ]
    model, routing = (dense_model, None) if kind == "dense" else (moe_model, [2, 2, 8])
    _check_near(_run(tmp_path, model, 1, layouts, dtype="float32", routing=routing), "compiled", 1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_mixed_precision_trains_nearly_alike(tmp_path: Path, dense_model: Path) -> None:
    layouts = [
        {"name": "whole", "micro_tokens": 64},
        {"name": "mixed", "micro_tokens": 64, "param_dtype": "bfloat16"},
    ]
    out = _run(tmp_path, dense_model, 1, layouts, dtype="float32")
    _check_near(out, "mixed", 0.1)
    expected, _ = _load(out, "whole")
    assert any(not torch.equal(_load(out, "mixed")[0][key], value) for key, value in expected.items())


def _check_near(out: Path, name: str, tolerance: float) -> None:
    """First gradients near those of the layout `whole`; parameters stay float32."""
    expected, _ = _load(out, "whole")
    gradients, parameters = _load(out, name)
    assert {tensor.dtype for tensor in parameters.values()} == {torch.float32}
    for key, gradient in expected.items():
        error = float((gradients[key] - gradient).norm() / gradient.norm())
        assert error < tolerance, (name, key, error)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_published_weights_of_two_ranks_are_the_full_state_dict_also_in_the_engine(
    tmp_path: Path, moe_model: Path
) -> None:
    layouts = [{"name": "shard", "micro_tokens": 64, "file_bytes": 50_000}]
    out = _run(tmp_path, moe_model, 2, layouts, dtype="float32", routing=[2, 2, 8])
    _check_published(out, "shard")
    _check_engine(moe_model, out, "shard")
    published = out / "shard" / "published"
    assert len(list(published.glob("*.safetensors"))) > 2
    assert (published / "tokenizer.json").exists()
    assert not list(published.glob(".part*"))
