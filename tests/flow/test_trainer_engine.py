"""Trainer and engine with the same weights agree on every log-probability (R32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.engine.builtin.model import load_runner
from moorage.engine.builtin.request import Request, SamplingParams
from moorage.engine.builtin.scheduler import Limits, Scheduler
from moorage.payload.assemble import assemble
from moorage.payload.codec import BranchArrays
from moorage.records.packing import pack
from moorage.records.payload import PayloadSlice
from moorage.records.sample import Span, TrainSample
from moorage.trainer.losses import make_loss
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.model import load_model
from moorage.trainer.rows import Row, make_row
from moorage.trainer.starter import make_model_folder
from moorage.trainer.step import TrainStep
from moorage.trainer.world import World


def sample(
    folder: Path, params: SamplingParams, dtype: str = "float32", count: int = 24
) -> list[BranchArrays]:
    """Completions of random prompts by the built-in engine, as a worker would keep them."""
    moe = "moe" in (folder / "config.json").read_text()
    scheduler = Scheduler(
        load_runner(str(folder), device="cpu", dtype=dtype, routed_experts=moe), Limits(16, 128)
    )
    rng = np.random.default_rng(0)
    requests = []
    for index in range(count):
        prompt = np.array([3, *rng.integers(72, 98, rng.integers(3, 9)), 1, 4])
        requests.append(
            Request(str(index), prompt, params, frozenset(), None, 12, seed=index, want_mask=params.truncated)
        )
        scheduler.add(requests[-1])
    while not scheduler.idle:
        scheduler.step()
    return [_keep(request) for request in requests]


def _keep(request: Request) -> BranchArrays:
    prompt, total = len(request.prompt), request.num_known
    mask = np.zeros(total, np.uint8)
    mask[prompt:] = 1
    logprobs = np.zeros(total, np.float32)
    logprobs[prompt:] = request.logprobs
    extras: dict[str, Any] = {}
    if request.masks:
        counts = np.zeros(total, np.int32)
        counts[prompt:] = [len(kept) for kept in request.masks]
        extras = {"sampling_counts": counts, "sampling_ids": np.concatenate(request.masks).astype(np.int32)}
    if request.routed_experts is not None:
        rows = np.asarray(request.routed_experts)
        rows = np.concatenate([rows, np.repeat(rows[-1:], total - len(rows), axis=0)])
        extras["routed_experts"] = np.ascontiguousarray(rows.astype(np.uint8))
    return BranchArrays(request.known().astype(np.int32), mask, logprobs, **extras)


def measure(folder: Path, kept: list[BranchArrays], temperature: float, *, replay: bool) -> dict[str, float]:
    """The trainer's metrics on these completions, before any update. With `replay` every router must have
    taken the engine's experts."""
    config = TrainerConfig(router_replay=replay, device="cpu")
    world = World(0, 1, torch.device("cpu"))
    model = load_model(ModelConfig(path=str(folder)), config, world, 64)
    step = TrainStep(model, make_loss({"type": "ipo"}), config, 1)
    metrics = StepMetrics(step.loss.metric_names)
    for row in _make_rows(kept, temperature, world, replay=replay):
        step.backward([row], metrics)
        if model.replay is not None:
            assert row.routing is not None
            told = row.routing >= 0
            assert torch.equal(model.replay.recorded()[told], row.routing[told].long())
    return metrics.agree(world)


def _make_rows(kept: list[BranchArrays], temperature: float, world: World, *, replay: bool) -> list[Row]:
    samples = []
    for index, arrays in enumerate(kept):
        n = arrays.num_tokens
        piece = PayloadSlice("", "", str(index), n, n, tuple(arrays.present()), arrays.routing, 0)
        samples.append(TrainSample(piece, (Span(0, n, 1.0),), env="e", temperature=temperature))
    arrays_by_id: dict[str, Any] = {str(index): arrays for index, arrays in enumerate(kept)}
    return [
        make_row(assemble(micro, arrays_by_id), torch.float32, world.device, replay=replay)
        for micro in pack(samples, 256)[0]
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.6),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(max_tokens=12, ignore_eos=True, top_k=1),
    ],
    ids=["plain", "temperature", "truncated", "singleton"],
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_mismatch_is_numerical_noise(
    dense_model: Path, moe_model: Path, kind: str, params: SamplingParams
) -> None:
    folder = dense_model if kind == "dense" else moe_model
    found = measure(folder, sample(folder, params), params.temperature, replay=kind == "moe")
    assert found["logprob_gap/max"] < 1e-4
    assert found["mismatch_kl/max"] < 1e-6
    if params.top_k == 1:
        assert found["logprob_gap/max"] == 0.0


@pytest.mark.parametrize("dense_layer", [0, 1])
def test_a_layer_without_experts_shifts_no_choice(tmp_path: Path, dense_layer: int) -> None:
    overrides = {"mlp_only_layers": [dense_layer]}
    folder = make_model_folder(tmp_path / "model", "qwen3_moe", overrides=overrides)
    kept = sample(folder, SamplingParams(max_tokens=12, ignore_eos=True), dtype="bfloat16")
    assert {arrays.routing for arrays in kept} == {(2, 2)}
    assert not any(arrays.routed_experts[:, dense_layer].any() for arrays in kept)
    assert all(arrays.routed_experts[:, 1 - dense_layer].any() for arrays in kept)
    assert measure(folder, kept, 1.0, replay=True)["mismatch_kl/mean"] < 1e-3


def test_truncated_sampling_without_its_kept_sets_would_bias_every_ratio(dense_model: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, top_k=20, top_p=0.9)
    blind = [BranchArrays(a.token_ids, a.loss_mask, a.logprobs) for a in sample(dense_model, params)]
    assert measure(dense_model, blind, 1.0, replay=False)["logprob_gap/mean"] > 0.05


def test_replay_brings_a_bfloat16_engine_closer(moe_model: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    kept = sample(moe_model, params, dtype="bfloat16", count=64)
    with_replay = measure(moe_model, kept, 1.0, replay=True)["logprob_gap/mean"]
    plain = [BranchArrays(a.token_ids, a.loss_mask, a.logprobs) for a in kept]
    without = measure(moe_model, plain, 1.0, replay=False)["logprob_gap/mean"]
    print(f"mean |difference of log-probabilities| with replay {with_replay:.2e}, without {without:.2e}")
    assert with_replay < without
