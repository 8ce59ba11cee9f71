"""Batches in the run folder: the orchestrator writes them, every data rank reads its own (docs/protocols.md
section 4).

    batches/step_N/rank_R.msgpack    one `RankBatch` per data rank
    batches/step_N/orchestrator      the orchestrator's own state after this batch
    batches/step_N/READY             written last

Promises:
- a folder appears whole: it is written under a temporary name and renamed, READY is written last, and readers
  look at READY only;
- a READY batch is never overwritten;
- a reader that waits ends when its peer is gone (R35).

Does not know what is in a sample, nor when a batch may go.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

import msgspec

from moorage.core.errors import ExchangeError
from moorage.core.rundir import PeerWatch, RunDir, mark_ready, ready_steps, write_bytes_atomic
from moorage.records.payload import PayloadSlice
from moorage.records.sample import RankBatch, decode_rank_batch, encode_rank_batch, owned_slices

STATE_FILE = "orchestrator"


def write_batch(run: RunDir, step: int, rank_batches: list[RankBatch], state: bytes) -> int:
    """Write the batch of `step`; returns its size in bytes. The payloads in it then belong to the trainer.

    `rank_batches[r]` is data rank r's; `state` is opaque here. Raises ExchangeError when the ranks do not fit
    together or the step already has a READY batch.
    """
    _check_ranks(step, rank_batches)
    folder = run.batch(step)
    if (folder / "READY").exists():
        raise ExchangeError(f"{folder} already holds a READY batch; a batch is never written twice")
    shutil.rmtree(folder, ignore_errors=True)  # a torn one of an attempt that was killed
    temporary = run.batches / f".step_{step}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.mkdir(parents=True)
    try:
        size_bytes = len(state)
        (temporary / STATE_FILE).write_bytes(state)
        for batch in rank_batches:
            encoded = encode_rank_batch(batch)
            (temporary / _rank_file(batch.data_rank)).write_bytes(encoded)
            size_bytes += len(encoded)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    mark_ready(folder)
    return size_bytes


def wait_for_batch(run: RunDir, step: int, rank: int, watch: PeerWatch, poll_s: float = 0.02) -> RankBatch:
    """Block until data rank `rank`'s batch of `step` is READY and return it.

    Unblocked by the orchestrator's `write_batch`, or by `watch`, which raises RunEnded when the orchestrator
    cannot write it any more. Raises ExchangeError when the file is missing or does not belong here.
    """
    ready = run.batch(step) / "READY"
    checked_at = 0.0
    while not ready.exists():
        if time.monotonic() - checked_at > 0.5:  # two small files: not on every poll
            watch.check()
            checked_at = time.monotonic()
        time.sleep(poll_s)
    return read_batch(run, step, rank)


def read_batch(run: RunDir, step: int, rank: int) -> RankBatch:
    """Data rank `rank`'s batch of `step`, which must be READY."""
    path = run.batch(step) / _rank_file(rank)
    try:
        batch = decode_rank_batch(path.read_bytes())
    except FileNotFoundError:
        raise ExchangeError(
            f"{path} is missing: the batch was written for another number of data ranks; start with the "
            "number it was written for, or resume without the batches after the checkpoint"
        ) from None
    except msgspec.MsgspecError as error:
        raise ExchangeError(f"{path} is not a batch this version can read: {error}") from None
    if (batch.step, batch.data_rank) != (step, rank):
        raise ExchangeError(f"{path} holds step {batch.step} of data rank {batch.data_rank}")
    return batch


def read_state(run: RunDir, step: int) -> bytes:
    """The orchestrator's state after the READY batch of `step`."""
    path = run.batch(step) / STATE_FILE
    if not (run.batch(step) / "READY").exists():
        raise ExchangeError(f"{run.batch(step)} is not READY: it holds no state to continue from")
    return path.read_bytes()


def newest_batch(run: RunDir) -> int | None:
    """The newest step whose batch is READY."""
    steps = ready_steps(run.batches)
    return steps[-1] if steps else None


def read_owned_slices(run: RunDir, first_step: int) -> list[PayloadSlice]:
    """The payloads of all READY batches from `first_step` on, each once (what a resumed attempt adopts)."""
    seen: dict[str, PayloadSlice] = {}
    for step in ready_steps(run.batches):
        if step < first_step:
            continue
        for path in sorted(run.batch(step).glob("rank_*.msgpack")):
            for payload in owned_slices(decode_rank_batch(path.read_bytes()).micro_batches):
                seen.setdefault(payload.id, payload)
    return list(seen.values())


def remove_batches(run: RunDir, up_to_step: int) -> list[int]:
    """Delete the batches of steps up to `up_to_step`, READY first; returns which steps went."""
    removed = []
    for step in ready_steps(run.batches):
        if step <= up_to_step:
            (run.batch(step) / "READY").unlink(missing_ok=True)
            shutil.rmtree(run.batch(step), ignore_errors=True)
            removed.append(step)
    return removed


def write_state(folder: Path, state: bytes) -> None:
    """Write a checkpoint's orchestrator part: the same state that lies beside the batch, then READY."""
    write_bytes_atomic(folder / STATE_FILE, state)
    mark_ready(folder)


def read_checkpoint_state(folder: Path) -> bytes:
    """The state in a checkpoint's orchestrator part."""
    if not (folder / "READY").exists():
        raise ExchangeError(f"{folder} is not READY: resume from an older checkpoint that is whole")
    return (folder / STATE_FILE).read_bytes()


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.msgpack"


def _check_ranks(step: int, rank_batches: list[RankBatch]) -> None:
    if not rank_batches:
        raise ExchangeError(f"batch {step} has no data rank")
    if [batch.data_rank for batch in rank_batches] != list(range(len(rank_batches))):
        raise ExchangeError(f"batch {step}: data ranks {[b.data_rank for b in rank_batches]} are not 0..n-1")
    if {batch.num_data_ranks for batch in rank_batches} != {len(rank_batches)}:
        raise ExchangeError(f"batch {step}: {len(rank_batches)} rank batches disagree about their number")
    if len({len(batch.micro_batches) for batch in rank_batches}) != 1:
        counts = [len(batch.micro_batches) for batch in rank_batches]
        raise ExchangeError(f"batch {step}: ranks have {counts} micro batches; they must have equally many")
    if any(batch.step != step for batch in rank_batches):
        raise ExchangeError(f"batch {step} holds a rank batch of another step")
