"""From a batch to files: pack, write, checkpoint, and the row of metrics that belongs to the step.

The writing half runs in a thread and is never cut short: once a batch is cut it becomes READY or the process
fails. Does not decide when to ship.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moorage.config.run import CheckpointConfig, ProcessFacts
from moorage.core.rundir import RunDir, checkpoint_steps, ready_steps, whole_checkpoints
from moorage.exchange.batches import remove_batches, write_batch, write_state
from moorage.exchange.weights import remove_version
from moorage.orchestrator.sink_records import Batch
from moorage.records.packing import SequenceCost, pack, sequence_cost
from moorage.records.sample import MicroBatch, RankBatch


@dataclass(frozen=True)
class Written:
    """What writing a batch took."""

    pack_s: float
    write_s: float
    size_bytes: int
    num_micro_batches: int
    num_dummies: int


class Shipper:
    """Writes batches of one attempt."""

    def __init__(
        self,
        run: RunDir,
        facts: ProcessFacts,
        checkpoint: CheckpointConfig,
        *,
        num_data_ranks: int,
        cost: SequenceCost,
    ) -> None:
        self._run = run
        self._facts = facts
        self._checkpoint = checkpoint
        self._num_data_ranks = num_data_ranks
        self._cost = cost

    def write(self, batch: Batch, state: bytes) -> Written:
        """Pack and write; blocks. The payloads belong to the trainer when this returns."""
        started = time.perf_counter()
        ranks = pack(batch.samples, self._facts.seq_len, self._num_data_ranks, self._cost)
        packed = time.perf_counter()
        records = [self._record(batch.step, rank, micro) for rank, micro in enumerate(ranks)]
        size_bytes = write_batch(self._run, batch.step, records, state)
        if self._checkpoint.is_due(batch.step, self._facts.max_steps):
            write_state(self._run.checkpoint(batch.step, "orchestrator"), state)
        return Written(
            pack_s=packed - started,
            write_s=time.perf_counter() - packed,
            size_bytes=size_bytes,
            num_micro_batches=sum(len(micro) for micro in ranks),
            num_dummies=sum(batch.dummy for micro in ranks for batch in micro),
        )

    def _record(self, step: int, rank: int, micro: Sequence[MicroBatch]) -> RankBatch:
        return RankBatch(
            run_id=self._facts.run_id,
            attempt=self._facts.attempt,
            step=step,
            policy_version=step - 1,
            data_rank=rank,
            num_data_ranks=self._num_data_ranks,
            micro_batches=tuple(micro),
        )


def load_cost(model_path: str) -> SequenceCost:
    """The packing cost of a model folder; tokens when it has no readable config.json."""
    try:
        return sequence_cost(json.loads((Path(model_path) / "config.json").read_text()))
    except (OSError, ValueError):
        return SequenceCost()


def clean_up(run: RunDir, live_version: int, *, retain_batches: bool) -> None:
    """Remove what nobody needs any more, now that `live_version` is live on all replicas: older weights that
    no checkpoint names, and the batches of steps that are trained (with `retain_batches`: that a whole
    checkpoint covers). Blocks."""
    named = checkpoint_steps(run)
    for version in ready_steps(run.weights):
        if version < live_version and version not in named:
            remove_version(run, version)
    whole = whole_checkpoints(run)
    remove_batches(run, (whole[-1] if whole else 0) if retain_batches else live_version)
