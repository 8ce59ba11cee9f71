"""`torchrun -m tests.support.rank_worker <spec.json>`: the same three training steps in several layouts.

For each layout the main rank writes the gradient of the first step, the parameters after
three steps, and all ranks what the exporter publishes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.payload.assemble import assemble
from moorage.payload.codec import BranchArrays
from moorage.records.packing import pack
from moorage.records.payload import PayloadSlice
from moorage.records.sample import Span, TrainSample
from moorage.trainer.export import Exporter
from moorage.trainer.losses import make_loss
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.model import load_model
from moorage.trainer.optimizer import clip_gradients
from moorage.trainer.rows import Row, float_dtype, make_row
from moorage.trainer.step import TrainStep
from moorage.trainer.world import World, make_world
from tests.support.training import make_arrays


def make_rows(spec: dict[str, Any], layout: dict[str, Any], step: int, world: World) -> list[Row]:
    """This rank's share of the step's samples, the same samples in every layout."""
    rng = np.random.default_rng(step)
    routing = tuple(spec["routing"]) if spec.get("routing") else None
    samples, arrays = [], {}
    for index in range(13):
        branch = make_arrays(rng, int(rng.integers(6, 22)), routing)
        arrays[str(index)] = branch
        samples.append(_sample(str(index), branch, float(rng.normal())))
    micros = pack(samples, layout["micro_tokens"], world.size)[world.rank]
    dtype = float_dtype(spec["dtype"])
    return [make_row(assemble(m, arrays), dtype, world.device, replay=routing is not None) for m in micros]


def _sample(name: str, branch: BranchArrays, advantage: float) -> TrainSample:
    n = branch.num_tokens
    piece = PayloadSlice("", "", name, n, n, tuple(branch.present()), branch.routing, 0)
    return TrainSample(piece, (Span(0, n, advantage, ce=0.1 if int(name) % 3 == 0 else 0.0),), env="e")


def full(tensor: torch.Tensor) -> torch.Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach().clone()


def run_layout(spec: dict[str, Any], layout: dict[str, Any], out: Path) -> None:
    trainer = TrainerConfig.model_validate(
        {
            "num_ranks": spec["num_ranks"],
            "replicate": layout.get("replicate", 1),
            "fsdp": layout.get("fsdp"),
            "device": "cpu",
            "router_replay": bool(spec.get("routing")),
            "activation_checkpointing": layout.get("activation_checkpointing", False),
            "compile": layout.get("compile", False),
            "param_dtype": layout.get("param_dtype"),
            "optimizer": {"lr": 1e-3},
        }
    )
    world = make_world(trainer)
    model = load_model(ModelConfig(path=spec["model"], dtype=spec["dtype"]), trainer, world, 64)
    step = TrainStep(model, make_loss({"type": "ipo", "eps": 0.9}), trainer, 3)
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(1, 4):
        step.backward(make_rows(spec, layout, number, world), StepMetrics(step.loss.metric_names))
        if number == 1:
            saved["gradients"] = {n: full(p.grad) for n, p in model.module.named_parameters()}
        clip_gradients(model.parameters(), 1.0)
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)
    saved["parameters"] = {n: full(p) for n, p in model.module.named_parameters()}
    if world.is_main:
        (out / "published").mkdir(parents=True)
        for name, tensors in saved.items():
            save_file(tensors, out / f"{name}.safetensors")
    world.barrier()
    Exporter(model, Path(spec["model"]), file_bytes=layout.get("file_bytes", 1 << 30)).write(
        out / "published"
    )
    world.barrier()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    for layout in spec["layouts"]:
        run_layout(spec, layout, Path(spec["out"]) / layout["name"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
