"""What router replay is worth: a mixture of experts served in float32 and in bfloat16, trained in float32.

    python bench/replay.py MODEL [--count 128]

MODEL: a folder, such as that of `moorage sft @ examples/moe/sft.toml`. The built-in engine answers the same
prompts in both dtypes; the trainer then computes the log-probabilities of the answers before any update.
Printed per dtype of the engine: routing flips (the share of routers' decisions for which the trainer by
itself takes another set of experts than the engine did), and with and without replay the mean absolute
difference of the log-probabilities and the mean mismatch KL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
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
from moorage.trainer.step import TrainStep
from moorage.trainer.world import World

MAX_TOKENS = 12
ROW_TOKENS = 512


def make_prompts(folder: str, count: int) -> list[np.ndarray]:
    """Random strings as user turns, in the model's own chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(count):
        text = "".join(chr(code) for code in rng.integers(97, 123, rng.integers(4, 9)))
        turns = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompts.append(np.array(tokenizer.encode(rendered, add_special_tokens=False)))
    return prompts


def answer(folder: str, dtype: str, prompts: list[np.ndarray]) -> list[BranchArrays]:
    """The engine's answers, as a worker would keep them."""
    runner = load_runner(folder, device="cpu", dtype=dtype, routed_experts=True)
    scheduler = Scheduler(runner, Limits(32, 128))
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)  # as many tokens in both dtypes
    requests = [
        Request(str(index), prompt, params, frozenset(), None, MAX_TOKENS, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    while not scheduler.idle:
        scheduler.step()
    return [keep(request) for request in requests]


def keep(request: Request) -> BranchArrays:
    prompt, total = len(request.prompt), request.num_known
    mask, logprobs = np.zeros(total, np.uint8), np.zeros(total, np.float32)
    mask[prompt:], logprobs[prompt:] = 1, request.logprobs
    rows = np.asarray(request.routed_experts)
    rows = np.concatenate([rows, np.repeat(rows[-1:], total - len(rows), axis=0)])
    return BranchArrays(
        request.known().astype(np.int32), mask, logprobs, routed_experts=np.ascontiguousarray(rows)
    )


def make_rows(kept: list[BranchArrays], world: World) -> list[Row]:
    samples, arrays = [], {}
    for index, branch in enumerate(kept):
        n = branch.num_tokens
        piece = PayloadSlice("", "", str(index), n, n, tuple(branch.present()), branch.routing, 0)
        samples.append(TrainSample(piece, (Span(0, n, 1.0),), env="bench"))
        arrays[str(index)] = branch
    micros = pack(samples, ROW_TOKENS)[0]
    return [make_row(assemble(micro, arrays), torch.float32, world.device, replay=True) for micro in micros]


def measure(folder: str, rows: list[Row], world: World, *, replay: bool) -> dict[str, float]:
    """The trainer's metrics before an update. Without replay its routers decide by themselves."""
    config = TrainerConfig(router_replay=True, device="cpu")
    model = load_model(ModelConfig(path=folder), config, world, ROW_TOKENS)
    assert model.replay is not None
    step = TrainStep(model, make_loss({"type": "ipo"}), config, 1)
    metrics = StepMetrics(step.loss.metric_names)
    flips = total = 0
    for row in rows:
        assert row.routing is not None
        free = torch.full_like(row.routing, -1)
        step.backward([replace(row, routing=row.routing if replay else free)], metrics)
        own, engine = (ids[:, model.replay.layers] for ids in (model.replay.recorded(), row.routing))
        known = (engine >= 0).all(-1)
        differs = (own.sort(-1).values != engine.sort(-1).values).any(-1)
        flips, total = flips + int((differs & known).sum()), total + int(known.sum())
    agreed = metrics.agree(world)
    return {
        "flips": flips / total,
        "gap": agreed["logprob_gap/mean"],
        "kl": agreed["mismatch_kl/mean"],
        "kl_max": agreed["mismatch_kl/max"],
    }


def compare(folder: str, dtype: str, prompts: list[np.ndarray]) -> dict[str, Any]:
    world = World(0, 1, torch.device("cpu"))
    kept = answer(folder, dtype, prompts)
    rows = make_rows(kept, world)
    with_replay, without = (measure(folder, rows, world, replay=replay) for replay in (True, False))
    if with_replay["flips"]:
        raise SystemExit("replay did not take the engine's experts")
    return {
        "engine": dtype,
        "answers": len(kept),
        "trained_tokens": sum(branch.num_trainable for branch in kept),
        "routing_flips": without["flips"],
        "mean_abs_logprob_difference": {"replay": with_replay["gap"], "no_replay": without["gap"]},
        "mismatch_kl_mean": {"replay": with_replay["kl"], "no_replay": without["kl"]},
        "mismatch_kl_max": {"replay": with_replay["kl_max"], "no_replay": without["kl_max"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = make_prompts(args.model, args.count)
    for dtype in ("float32", "bfloat16"):
        print(json.dumps(compare(args.model, dtype, prompts)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
