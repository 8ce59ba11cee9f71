"""A synthetic run for the trainer: a real payload store with real blobs, batch files, and the trainer's
config.

What the orchestrator and the env servers would write, without either. Everything is a function of the seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moorage.config.run import TrainerProcessConfig
from moorage.core.rundir import Heartbeat, RunDir
from moorage.exchange.batches import write_batch
from moorage.payload.codec import BranchArrays, encode
from moorage.payload.server import PayloadService
from moorage.payload.spool import Spool
from moorage.records.packing import pack
from moorage.records.payload import PayloadSlice
from moorage.records.sample import RankBatch, Span, TrainSample

TOKEN = "5a" * 32
STORE = "train/synthetic.test"


def make_arrays(
    rng: np.random.Generator, num_tokens: int, routing: tuple[int, int, int] | None = None
) -> BranchArrays:
    """A random branch: the last two thirds are trained. `routing`: (layers, k, experts)."""
    prompt = max(1, num_tokens // 3)
    mask = np.zeros(num_tokens, np.uint8)
    mask[prompt:] = 1
    logprobs = np.where(mask, -rng.exponential(1.0, num_tokens), 0.0).astype(np.float32)
    rows = None
    if routing is not None:
        layers, k, experts = routing
        rows = rng.permuted(np.tile(np.arange(experts), (num_tokens, layers, 1)), axis=-1)[..., :k]
        rows = np.ascontiguousarray(rows.astype(np.uint8 if experts <= 256 else np.uint16))
    return BranchArrays(
        token_ids=rng.integers(7, 102, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        routed_experts=rows,
    )


@dataclass
class SyntheticRun:
    """A run folder with a payload store. Use as a context manager."""

    root: Path
    seed: int = 0
    num_ranks: int = 1
    routing: tuple[int, int, int] | None = None
    service: PayloadService = field(init=False)
    spool: Spool = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunDir(self.root / "run")
        self.rng = np.random.default_rng(self.seed)
        self.kept: dict[str, BranchArrays] = {}

    def __enter__(self) -> SyntheticRun:
        self.run.root.mkdir(parents=True)
        self.spool = Spool(self.root / "spool", "run-1", 1 << 30)
        self.service = PayloadService(self.root / "spool", token=TOKEN, log_path=self.root / "payload.log")
        self.service.start()
        self.heartbeat = Heartbeat(self.run, "orchestrator").start()
        return self

    def __exit__(self, *_: object) -> None:
        self.heartbeat.stop()
        self.service.stop()
        self.spool.close()

    def keep(self, arrays: BranchArrays) -> PayloadSlice:
        """Put a blob into the store; returns the reference to all of it."""
        buffers = encode(arrays)
        blob_id = self.spool.keep("request", buffers)
        self.kept[blob_id] = arrays
        return PayloadSlice(
            url=self.service.url,
            store=STORE,
            id=blob_id,
            num_tokens=arrays.num_tokens,
            total_tokens=arrays.num_tokens,
            fields=tuple(arrays.present()),
            routing=arrays.routing,
            nbytes=sum(memoryview(buffer).nbytes for buffer in buffers),
        )

    def make_samples(self, count: int, low: int = 8, high: int = 24) -> list[TrainSample]:
        """Samples with random lengths and advantages, kept in the store."""
        samples = []
        for _ in range(count):
            arrays = make_arrays(self.rng, int(self.rng.integers(low, high + 1)), self.routing)
            span = Span(0, arrays.num_tokens, advantage=float(self.rng.normal()))
            samples.append(TrainSample(self.keep(arrays), (span,), env="synthetic", versions=(0, 0)))
        return samples

    def write_step(self, step: int, count: int = 8, seq_len: int = 64) -> list[TrainSample]:
        """Write the batch of `step`."""
        samples = self.make_samples(count)
        self.write_samples(step, samples, seq_len)
        return samples

    def write_samples(self, step: int, samples: list[TrainSample], seq_len: int = 64) -> None:
        ranks = pack(samples, seq_len, self.num_ranks)
        write_batch(
            self.run,
            step,
            [
                RankBatch("run", 1, step, step - 1, rank, self.num_ranks, tuple(micros))
                for rank, micros in enumerate(ranks)
            ],
            b"state",
        )

    def config(self, model: Path, max_steps: int, **changes: Any) -> TrainerProcessConfig:
        """The trainer's config; `changes` are dotted keys with `__` for the dot."""
        data: dict[str, Any] = {
            "facts": {"run_dir": str(self.run), "run_id": "run", "max_steps": max_steps, "seq_len": 64},
            "trainer": {"num_ranks": self.num_ranks, "device": "cpu", "optimizer": {"lr": 1e-3}},
            "model": {"path": str(model)},
            "checkpoint": {},
            "payload": {},
            "monitor": {},
        }
        for key, value in changes.items():
            *parents, last = key.split("__")
            at = data
            for parent in parents:
                at = at.setdefault(parent, {})
            at[last] = value
        return TrainerProcessConfig.model_validate(data)

    def start_trainer(self, config: TrainerProcessConfig) -> subprocess.Popen[bytes]:
        """The trainer as real processes: torchrun when it has several ranks."""
        path = self.run.configs / "trainer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.model_dump_json())
        log = self.run.logs / "trainer.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.support.run_trainer", str(path)]
        if self.num_ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
            command = [sys.executable, *torchrun, "-m", "tests.support.run_trainer", str(path)]
        with log.open("ab") as output:
            return subprocess.Popen(command, env=process_env(), stdout=output, stderr=output)

    def metrics(self) -> list[dict[str, float]]:
        """The trainer's metrics, one record per step."""
        path = self.run.metrics("trainer")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log_text(self) -> str:
        return (self.run.logs / "trainer.log").read_text()


def process_env() -> dict[str, str]:
    """Environment of a trainer process."""
    return os.environ | {"MOORAGE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
