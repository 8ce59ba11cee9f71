"""What one attempt of the trainer holds, and the order of a step's stages.

A step: take (wait, fetch, agree) -> read the next step ahead -> free the payloads -> train -> publish ->
checkpoint -> metrics. Payloads are freed before the forward pass: by then every rank has its arrays in
memory.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moorage.config.run import TrainerProcessConfig
from moorage.core.errors import ConfigError
from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir
from moorage.core.secret import TOKEN_VARIABLE
from moorage.exchange.weights import publish_weights
from moorage.monitor.setup import make_monitor
from moorage.payload.client import PayloadClient
from moorage.trainer.agreement import on_all_ranks
from moorage.trainer.data import BatchFeed, FeedSettings, StepInput
from moorage.trainer.export import Exporter
from moorage.trainer.losses import make_loss
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.model import load_model
from moorage.trainer.retention import Retention
from moorage.trainer.rows import Row, float_dtype, make_row
from moorage.trainer.state import CheckpointStore, Progress, prune_checkpoints
from moorage.trainer.step import TrainStep
from moorage.trainer.world import make_world

log = get_logger(__name__)


class Session:
    """Model, optimizer, feed and stores of one attempt."""

    def __init__(self, config: TrainerProcessConfig, run: RunDir, stop: threading.Event) -> None:
        self.config = config
        self.run = run
        self.stop = stop
        facts, trainer = config.facts, config.trainer
        loss = make_loss(trainer.loss)  # before the model: a wrong name should not cost a model load
        self.world = make_world(trainer)
        torch.manual_seed(facts.seed if trainer.seed is None else trainer.seed)
        self.model = load_model(config.model, trainer, self.world, facts.seq_len)
        self.step = TrainStep(self.model, loss, trainer, facts.max_steps)
        self.exporter = Exporter(self.model, Path(config.model.path))
        self.checkpoints = CheckpointStore(run, self.model, self.step.optimizer)
        self.progress = Progress(step=facts.start_step - 1)
        if facts.start_step > 1:
            self.progress = self.checkpoints.load(facts.start_step - 1)
        self.client = make_client(config)
        settings = FeedSettings(
            fetch_timeout_s=trainer.fetch_timeout_s,
            prefetch_budget_bytes=trainer.prefetch_budget_mib << 20,
            routing=None if self.model.replay is None else self.model.replay.shape,
        )
        self.feed = BatchFeed(run, self.world, self.client, settings, stop)
        self.retention = Retention(run, config.payload.retain, config.checkpoint, self.feed)
        self.monitor = (
            make_monitor(config.monitor, run, "trainer", facts.run_id) if self.world.is_main else None
        )
        log.info(
            "%d parameters, %d rank(s) on %s, step %d of %d",
            self.model.num_parameters,
            self.world.size,
            self.world.device,
            facts.start_step,
            facts.max_steps,
        )

    def train(self) -> None:
        """All steps of the attempt. Raises RunEnded when told to stop or when the orchestrator is gone."""
        first, last = self.config.facts.start_step, self.config.facts.max_steps
        self._publish(first - 1)
        for step in range(first, last + 1):
            self._train_step(step, last)
        self._finish(last)

    def close(self) -> None:
        """Give everything back. Payloads still held are deleted unless a resume needs them."""
        self.feed.close(release=self.config.payload.retain == "fetched")
        self.checkpoints.close()
        self.client.close()
        if self.monitor is not None:
            self.monitor.close()
        self.world.close()

    def _train_step(self, step: int, last: int) -> None:
        started = time.perf_counter()
        metrics = StepMetrics(self.step.loss.metric_names)
        work = self.feed.take(step)
        if step < last:
            self.feed.prefetch(step + 1)
        self.retention.settle(step)
        rows = on_all_ranks(self.world, lambda: self._make_rows(work))
        self.step.run(step, rows, metrics)
        self._count(step, work)
        self._timed(metrics, "time/publish", lambda: self._publish(step))
        self._timed(metrics, "time/checkpoint", lambda: self._checkpoint(step, last))
        measure_batch(metrics, work, rows, self.world.device)
        metrics.add_sum("payload/undelivered_deletes", len(self.client.pending_releases))
        self._report(step, metrics, time.perf_counter() - started)

    def _make_rows(self, work: StepInput) -> list[Row]:
        dtype = float_dtype(self.config.model.dtype)
        replay = self.model.replay is not None
        return [make_row(arrays, dtype, self.world.device, replay=replay) for arrays in work.arrays]

    def _count(self, step: int, work: StepInput) -> None:
        own = torch.zeros(2, dtype=torch.float64)
        for micro in work.batch.micro_batches:
            if not micro.dummy:
                own += torch.tensor([micro.num_tokens, len(micro.samples)])
        tokens, samples = self.world.all_reduce(own).tolist()
        self.progress = Progress(
            step, self.progress.tokens + int(tokens), self.progress.samples + int(samples)
        )

    def _publish(self, version: int) -> None:
        publish_weights(
            self.run, version, self.exporter.write, is_main=self.world.is_main, meet=self.world.barrier
        )

    def _checkpoint(self, step: int, last: int) -> None:
        self.checkpoints.finish(wait=False)
        if self.config.checkpoint.is_due(step, last):
            self.checkpoints.save(self.progress)
        if self.world.is_main:
            prune_checkpoints(self.run, self.config.checkpoint)

    def _finish(self, last: int) -> None:
        """After the last step: the final checkpoint is on disk, retained payloads are freed."""
        self.checkpoints.finish()
        self.retention.finish(last, PeerWatch(self.run, "orchestrator"), self.stop)
        if self.world.is_main:
            prune_checkpoints(self.run, self.config.checkpoint)

    def _report(self, step: int, metrics: StepMetrics, step_s: float) -> None:
        agreed = metrics.agree(self.world)
        agreed["time/step"] = step_s
        agreed["perf/throughput"] = agreed["tokens/real"] / max(step_s, 1e-9)
        agreed["progress/tokens"], agreed["progress/samples"] = self.progress.tokens, self.progress.samples
        if self.monitor is not None:
            self.monitor.log(agreed, step)

    @staticmethod
    def _timed(metrics: StepMetrics, name: str, act: Callable[[], object]) -> None:
        started = time.perf_counter()
        act()
        metrics.put(name, time.perf_counter() - started)


def make_client(config: TrainerProcessConfig) -> PayloadClient:
    """The payload client of this rank. Raises ConfigError without the attempt's secret."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set: payload stores refuse a trainer without the attempt's secret"
        )
    return PayloadClient(
        token, connections=config.trainer.fetch_connections, run_dir=Path(config.facts.run_dir)
    )


def measure_batch(metrics: StepMetrics, work: StepInput, rows: Sequence[Row], device: torch.device) -> None:
    """Count what the step was made of: tokens, padding, lag, fetching, memory."""
    for micro, row in zip(work.batch.micro_batches, rows, strict=True):
        real = 0 if micro.dummy or row.dropped else row.num_tokens
        metrics.add_sum("tokens/real", real)
        metrics.add_sum("tokens/computed", row.num_tokens)
        metrics.add_sum("tokens/attended", row.layout.padded_tokens)
        metrics.add_sum("tokens/unusable_logprobs", row.num_unusable)
        if not micro.dummy:
            lags = [
                work.batch.policy_version - s.versions[0] for s in micro.samples if s.versions is not None
            ]
            metrics.add_mean("policy/lag", torch.tensor(lags, dtype=torch.float64), with_max=True)
    if work.batch.data_rank == 0:  # agreed over ranks already
        metrics.add_sum("payload/dropped_micro_batches", work.num_dropped)
    metrics.add_sum("payload/bytes_fetched", work.bytes_fetched)
    metrics.add_mean("payload/fetch_s", torch.tensor([work.fetch_s]), with_max=True)
    metrics.put_max("time/fetch", work.fetch_s)
    metrics.put_max("time/wait_for_batch", work.wait_s)
    metrics.put_max("perf/peak_memory_mib", peak_memory_mib(device))


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this rank: of the device, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
