"""A data rank's batches: read, fetched ahead of time, agreed on with the other ranks, freed.

The life of step N here:
1. a thread waits for `batches/step_N` and fetches its payloads while step N - 1 trains, up to a byte budget
   (`prefetch`; it only ever fetches);
2. at the step boundary `take(N)` fetches the rest on the main thread and assembles the micro batches;
3. one all-reduce agrees which micro batches failed, before any divisor is computed; a failed one is a
   placeholder that trains on nothing; when nothing could be fetched anywhere, every rank stops with one
   message;
4. `settle` deletes the payloads, each once over all ranks; what a store did not confirm is carried over to
   the next step by the client.

Promises: a dummy owns nothing, is fetched only when routing is replayed, and its failed fetch is no drop; a
payload is deleted only after every rank has it. Does not know: models, losses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from moorage.core.errors import ExchangeError, PayloadError, RunEnded
from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir
from moorage.exchange.batches import wait_for_batch
from moorage.payload.assemble import Assembled, assemble, placeholder
from moorage.payload.client import PayloadClient
from moorage.payload.codec import BranchArrays
from moorage.payload.custody import Custody
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, RankBatch, owned_slices
from moorage.trainer.agreement import agree_dropped, first_owners, on_all_ranks
from moorage.trainer.world import World

log = get_logger(__name__)

BATCH_POLL_S = 0.005
Payloads = dict[str, BranchArrays | PayloadError]


@dataclass(frozen=True)
class FeedSettings:
    """Limits of fetching. `routing`: (hidden layers, k) of the routing rows that are needed, also by dummies;
    None when routing is not replayed."""

    fetch_timeout_s: float
    prefetch_budget_bytes: int
    routing: tuple[int, int] | None


@dataclass(frozen=True)
class StepInput:
    """One step's work of this rank: assembled micro batches in order, and what it took to get them.

    `wait_s`: how long the main thread waited until the batch was there; `fetch_s`: from then (or from when it
    asked) until everything was assembled and agreed on, so what prefetching hid is in neither.
    """

    batch: RankBatch
    arrays: list[Assembled]
    num_dropped: int
    wait_s: float
    fetch_s: float
    bytes_fetched: int


@dataclass
class _Loaded:
    """A batch read ahead, at `read_at` on the clock of `perf_counter`, with the payloads that fitted the
    budget."""

    batch: RankBatch
    read_at: float
    payloads: Payloads = field(default_factory=dict)


class _StoppableWatch(PeerWatch):
    """A peer watch that also ends when this process is told to stop."""

    def __init__(self, run: RunDir, peer: str, stop: threading.Event) -> None:
        super().__init__(run, peer)
        self._stop_event = stop

    def check(self) -> None:
        if self._stop_event.is_set():
            raise RunEnded("told to stop")
        super().check()


class BatchFeed:
    """Batches of one data rank, in step order."""

    def __init__(
        self, run: RunDir, world: World, client: PayloadClient, settings: FeedSettings, stop: threading.Event
    ) -> None:
        self.run = run
        self.world = world
        self.client = client
        self.settings = settings
        self._stop = stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: dict[int, Future[_Loaded]] = {}
        self.custody = Custody("trainer")
        self._steps: list[int] = []

    def prefetch(self, step: int) -> None:
        """Begin to wait for and fetch `step` on the thread."""
        if step not in self._ahead:
            self._ahead[step] = self._thread.submit(self._load, step)

    def take(self, step: int) -> StepInput:
        """The work of `step`. Collective. Unblocked by the orchestrator's batch, its death, or a stop.

        Raises RunEnded. When no payload of the step could be fetched, the main rank raises ExchangeError and
        the others RunEnded.
        """
        self.prefetch(step)
        started = time.perf_counter()
        loaded = on_all_ranks(self.world, lambda: self._ahead[step].result())
        wait_s = max(0.0, min(loaded.read_at, time.perf_counter()) - started)
        self._hold(loaded.batch)
        del self._ahead[step]
        arrays, failed = on_all_ranks(self.world, lambda: self._fetch_and_assemble(loaded))
        num_owned = sum(not micro.dummy for micro in loaded.batch.micro_batches)
        num_dropped = agree_dropped(self.world, step, failed, num_owned)
        return StepInput(
            batch=loaded.batch,
            arrays=arrays,
            num_dropped=num_dropped,
            wait_s=wait_s,
            fetch_s=time.perf_counter() - started - wait_s,
            bytes_fetched=_count_bytes(loaded.batch, loaded.payloads),
        )

    def settle(self, step: int) -> None:
        """Delete the payloads of `step`, each once over all ranks. Collective."""
        self._steps.remove(step)
        self.client.release(first_owners(self.custody.release_key(str(step)), self.world), "trainer")

    def held_steps(self) -> list[int]:
        """Ascending steps whose payloads this rank still owns."""
        return sorted(self._steps)

    def close(self, *, release: bool) -> None:
        """End the thread and try once more to deliver earlier deletes. `release`: delete what this rank still
        owns, also of a batch read ahead."""
        self._stop.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for future in self._ahead.values():
            if not future.cancelled() and future.exception() is None:
                self._hold(future.result().batch)
        refs = self.custody.release_all() if release else ()
        owed = len(refs) + len(self.client.pending_releases)
        if owed:
            freed = self.client.release(refs, "trainer")
            log.info("released %d of %d payloads still held at the end", freed, owed)

    def _hold(self, batch: RankBatch) -> None:
        self._steps.append(batch.step)
        self.custody.hold(str(batch.step), owned_slices(batch.micro_batches))

    def _load(self, step: int) -> _Loaded:
        watch = _StoppableWatch(self.run, "orchestrator", self._stop)
        batch = wait_for_batch(self.run, step, self.world.rank, watch, BATCH_POLL_S)
        if batch.num_data_ranks != self.world.size:
            raise ExchangeError(
                f"batch {step} was written for {batch.num_data_ranks} data ranks, this trainer has "
                f"{self.world.size}"
            )
        loaded = _Loaded(batch, time.perf_counter())
        if self.settings.routing is not None:
            check_routing(batch, self.settings.routing)
        ahead = within_budget(self._needed(batch), self.settings.prefetch_budget_bytes)
        if ahead:
            loaded.payloads |= self.client.fetch(ahead, self.settings.fetch_timeout_s)
        return loaded

    def _needed(self, batch: RankBatch) -> list[PayloadSlice]:
        """Every payload that this rank must read, each once, at its longest use."""
        needed: dict[str, PayloadSlice] = {}
        for micro in batch.micro_batches:
            if micro.dummy and not (self.settings.routing and micro.routing):
                continue
            for sample in micro.samples:
                known = needed.get(sample.payload.id)
                if known is None or known.num_tokens < sample.num_tokens:
                    needed[sample.payload.id] = sample.payload
        return list(needed.values())

    def _fetch_and_assemble(self, loaded: _Loaded) -> tuple[list[Assembled], list[bool]]:
        """The micro batches in order, and which of them failed. Raises ExchangeError on one that cannot be
        trained as it was sent (credit that does not fit its payload)."""
        rest = [piece for piece in self._needed(loaded.batch) if piece.id not in loaded.payloads]
        if rest:
            loaded.payloads |= self.client.fetch(rest, self.settings.fetch_timeout_s)
        donor = _any_routing(loaded.payloads)
        arrays, failed = [], []
        for micro in loaded.batch.micro_batches:
            missing = _first_missing(micro, loaded.payloads)
            failed.append(missing is not None and not micro.dummy)
            if missing is not None:
                if not micro.dummy:
                    log.error("step %d: a micro batch is dropped: %s", loaded.batch.step, missing)
                arrays.append(placeholder(micro, loaded.payloads, donor=donor))
                continue
            try:
                arrays.append(assemble(micro, loaded.payloads))
            except PayloadError as error:
                raise ExchangeError(f"batch {loaded.batch.step} cannot be trained: {error}") from error
        return arrays, failed


def check_routing(batch: RankBatch, shape: tuple[int, int]) -> None:
    """Raise ExchangeError when routing is to be replayed and a sample came without its rows, or with rows of
    another shape than the model's (hidden layers, k)."""
    for sample in (sample for micro in batch.micro_batches for sample in micro.samples):
        found = sample.payload.routing
        if found is None:
            raise ExchangeError(
                f"batch {batch.step}: trainer.router_replay is on, but payload {sample.payload.id} "
                f"({sample.env}) has no routing rows; set inference.routed_experts = true, or "
                "trainer.router_replay = false to let the trainer route by itself"
            )
        if tuple(found) != shape:
            raise ExchangeError(
                f"batch {batch.step}: the routing rows of payload {sample.payload.id} ({sample.env}) have "
                f"{found[0]} layers of {found[1]} experts, the model has {shape[0]} hidden layers and "
                f"chooses {shape[1]}: let engine and trainer run the same model, or set "
                "trainer.router_replay = false"
            )


def within_budget(slices: Iterable[PayloadSlice], budget_bytes: int) -> list[PayloadSlice]:
    """The leading slices whose blobs together stay within the budget."""
    chosen, total = [], 0
    for piece in slices:
        total += piece.nbytes
        if total > budget_bytes:
            break
        chosen.append(piece)
    return chosen


def _first_missing(micro: MicroBatch, payloads: Mapping[str, BranchArrays | PayloadError]) -> str | None:
    for sample in micro.samples:
        found = payloads.get(sample.payload.id)
        if found is None:
            return f"payload {sample.payload.id} was not fetched"
        if isinstance(found, PayloadError):
            return str(found)
    return None


def _count_bytes(batch: RankBatch, payloads: Payloads) -> int:
    sizes = {s.payload.id: s.payload.nbytes for micro in batch.micro_batches for s in micro.samples}
    return sum(sizes[key] for key, found in payloads.items() if not isinstance(found, PayloadError))


def _any_routing(payloads: Payloads) -> np.ndarray | None:
    for found in payloads.values():
        if isinstance(found, BranchArrays) and found.routed_experts is not None:
            return found.routed_experts
    return None
