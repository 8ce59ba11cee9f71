"""The training step of moorage against that of TRL's GRPO trainer: same model, batch, threads, in one run.

    python bench/trainer.py --trl-python PYTHON [--model FOLDER] [--repeats 7] [--shape short|long|both]

Two processes take turns step by step, so that a busy machine burdens both alike; the median counts. Both get
the same prompts, completions and log-probabilities, and make forward, loss, backward, clipping and AdamW with
one thread in float32. Printed: seconds per step, real tokens per second, peak memory, and the share of
computed positions that are padding, beside that of one sequence per row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

SHAPES = {"short": (128, 2048), "long": (24, 2048)}  # sequences, tokens of a packed row


def make_batch(shape: str, seed: int = 0) -> list[dict[str, Any]]:
    """`short`: the main job's lengths. `long`: lognormal lengths up to 480 tokens, as answers are."""
    rng = np.random.default_rng(seed)
    count, _ = SHAPES[shape]
    rows = []
    for _ in range(count):
        prompt = rng.integers(7, 102, rng.integers(7, 12)).tolist()
        length = rng.integers(3, 13) if shape == "short" else min(int(rng.lognormal(4.5, 0.9)) + 4, 480)
        completion = rng.integers(7, 102, int(length)).tolist()
        logprobs = (-rng.exponential(1.0, int(length)) - 3.0).tolist()
        rows.append(
            {
                "prompt": prompt,
                "completion": completion,
                "logprobs": logprobs,
                "advantage": float(rng.normal()),
            }
        )
    return rows


def serve_moorage(model_path: str, batch_file: str, shape: str) -> None:
    """moorage's side: a line in, a step, a line out."""
    import torch

    from moorage.config.model import ModelConfig
    from moorage.config.trainer import TrainerConfig
    from moorage.payload.assemble import assemble
    from moorage.payload.codec import BranchArrays
    from moorage.records.packing import pack
    from moorage.records.payload import PayloadSlice
    from moorage.records.sample import Span, TrainSample
    from moorage.trainer.losses import make_loss
    from moorage.trainer.metrics import StepMetrics
    from moorage.trainer.model import load_model
    from moorage.trainer.rows import make_row
    from moorage.trainer.step import TrainStep
    from moorage.trainer.world import World

    torch.set_num_threads(1)
    samples: list[TrainSample] = []
    arrays: dict[str, Any] = {}
    for index, row in enumerate(json.loads(Path(batch_file).read_text())):
        prompt, total = len(row["prompt"]), len(row["prompt"]) + len(row["completion"])
        mask, logprobs = np.zeros(total, np.uint8), np.zeros(total, np.float32)
        mask[prompt:], logprobs[prompt:] = 1, row["logprobs"]
        arrays[str(index)] = BranchArrays(
            np.array(row["prompt"] + row["completion"], np.int32), mask, logprobs
        )
        piece = PayloadSlice(
            "", "", str(index), total, total, ("token_ids", "loss_mask", "logprobs"), None, 0
        )
        samples.append(TrainSample(piece, (Span(0, total, row["advantage"]),), env="bench"))
    config = TrainerConfig.model_validate(
        {"router_replay": False, "device": "cpu", "optimizer": {"lr": 3e-4}}
    )
    world = World(0, 1, torch.device("cpu"))
    model = load_model(ModelConfig(path=model_path), config, world, 512)
    step = TrainStep(model, make_loss({"type": "ppo"}), config, 1 << 30)
    micros = pack(samples, SHAPES[shape][1])[0]
    rows = [make_row(assemble(micro, arrays), torch.float32, world.device, replay=False) for micro in micros]
    positions = sum(row.layout.padded_tokens for row in rows)
    print(
        json.dumps({"positions": positions, "row_positions": sum(row.num_tokens for row in rows)}), flush=True
    )
    for number, _ in enumerate(sys.stdin, start=1):
        metrics = StepMetrics(step.loss.metric_names)
        began = time.perf_counter()
        step.run(number, rows, metrics)
        spent = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        loss = metrics.agree(world)["loss"]
        print(json.dumps({"seconds": spent, "peak_mib": peak, "loss": loss}), flush=True)


class Side:
    """A process that makes one step whenever it is told to."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.first = self._read()
        self.answers: list[dict[str, float]] = []

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.answers.append(self._read())

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{' '.join(self.process.args[:2])} ended before it answered")  # type: ignore[index]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    @property
    def seconds(self) -> float:
        return statistics.median(answer["seconds"] for answer in self.answers[1:])


def compare(shape: str, model: str, trl_python: str, repeats: int, scratch: Path) -> dict[str, Any]:
    """One shape; returns the printed figures."""
    batch = make_batch(shape)
    batch_file = scratch / f"{shape}.json"
    batch_file.write_text(json.dumps(batch))
    here = Path(__file__).resolve()
    ours = Side([sys.executable, str(here), "--worker", shape, "--model", model, "--batch", str(batch_file)])
    theirs = Side(
        [trl_python, str(here.parent / "trl_step.py"), model, str(batch_file), str(scratch / f"trl_{shape}")]
    )
    for _ in range(repeats + 1):  # the first warms up
        ours.step()
        theirs.step()
    ours.close()
    theirs.close()
    real = sum(len(row["prompt"]) + len(row["completion"]) for row in batch)
    longest = max(len(row["prompt"]) + len(row["completion"]) for row in batch)
    return {
        "shape": shape,
        "sequences": len(batch),
        "real_tokens": real,
        "moorage_s": round(ours.seconds, 4),
        "trl_s": round(theirs.seconds, 4),
        "moorage_tokens_per_s": round(real / ours.seconds),
        "trl_tokens_per_s": round(real / theirs.seconds),
        "speed_ratio": round(theirs.seconds / ours.seconds, 2),
        "moorage_peak_mib": round(max(answer["peak_mib"] for answer in ours.answers)),
        "trl_peak_mib": round(max(answer["peak_mib"] for answer in theirs.answers)),
        "first_loss": [round(ours.answers[0]["loss"], 5), round(theirs.answers[0]["loss"], 5)],
        "row_padding_share": round(1 - real / ours.first["row_positions"], 3),
        "attention_padding_share": round(1 - real / ours.first["positions"], 3),
        "trl_padding_share": round(1 - real / theirs.first["positions"], 3),
        "one_per_row_padding_share": round(1 - real / (longest * len(batch)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="Python of an environment with trl and transformers")
    parser.add_argument("--model", help="model folder; default: a random starter model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--batch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve_moorage(args.model, args.batch, args.worker)
        return
    if not args.trl_python:
        parser.error("--trl-python is needed: python -m venv .venv-trl && .venv-trl/bin/pip install trl")
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if model is None:
            from moorage.trainer.starter import make_model_folder

            model = str(make_model_folder(Path(scratch) / "model"))
        shapes = list(SHAPES) if args.shape == "both" else [args.shape]
        for shape in shapes:
            figures = compare(shape, model, args.trl_python, args.repeats, Path(scratch))
            print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
