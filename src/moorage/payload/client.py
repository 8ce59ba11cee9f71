"""The reader's side: fetch payloads in parallel, free them, ask for the account.

Promises:
- `fetch` answers for every slice by the deadline: arrays cut to the slice, or a `PayloadError`. It retries
  lost connections, timeouts and 5xx with growing pauses; every other answer (404 above all) is final;
- a store on this node is read from its mapped files, not transferred; either way bytes go straight into the
  buffers that the arrays view; when under half of a blob is kept, only the kept prefix is read;
- no payload is cached: what the caller drops is gone; its memory, up to a bound, serves the next fetch;
- `release` loses nothing: what could not be delivered (also when it is interrupted half-way) is tried again
  by the next call, and is named by `pending_releases` until then. An unknown id is done.

Synchronous, with threads of its own: call it from a thread in asyncio programs.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.buffers import BufferPool, Buffers, Target
from moorage.payload.codec import BranchArrays, cut, decode
from moorage.payload.directory import StoreDirectory
from moorage.payload.mappings import Freed
from moorage.payload.ranges import ReadInto, is_worth_cutting, read_prefix
from moorage.payload.wire import Connection, ConnectionPool, ServiceAnswer
from moorage.records.payload import HOLDERS, Ledger, PayloadRef, PayloadSlice

_IDLE_BUFFER_BYTES = 1 << 29
_RELEASE_CHUNK = 1000
_TRY_S = 30.0
_RELEASE_TRY_S = 5.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0

T = TypeVar("T")
Fetched = dict[str, "BranchArrays | PayloadError"]


@dataclass
class FetchCounts:
    """What a client has done since it was made. Bytes are of arrays as handed over, mapped ones included."""

    bytes_http: int = 0
    bytes_mapped: int = 0
    blobs: int = 0
    retries: int = 0
    failed: int = 0

    @property
    def bytes_fetched(self) -> int:
        return self.bytes_http + self.bytes_mapped


class PayloadClient:
    """Fetches from and releases to any number of stores with one token. Safe to use from several threads."""

    def __init__(
        self,
        token: str,
        *,
        connections: int = 8,
        run_dir: str | os.PathLike[str] | None = None,
        map_local: bool = True,
        buffers: Buffers | None = None,
    ) -> None:
        """`run_dir`: run folder with address files; None: the references' urls serve, nothing is mapped.

        `connections`: parallel fetches, and connections per store. `buffers`: where fetched bytes go; None: a
        pool in which up to half a GiB of earlier fetches waits for the next.
        """
        self.counts = FetchCounts()
        self._pool = ConnectionPool(token)
        self._stores = StoreDirectory(run_dir)
        self._map_local = map_local
        self._buffers = buffers or BufferPool(_IDLE_BUFFER_BYTES)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="payload")
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], tuple[PayloadRef, str]] = {}
        self._closing = threading.Event()

    def fetch(self, slices: Iterable[PayloadSlice], deadline_s: float) -> Fetched:
        """Blob id to arrays (cut to `num_tokens`) or error, for each slice; waits at most `deadline_s`.

        An id that is named twice is fetched once, as long as the longer slice.
        """
        return {blob_id: future.result() for blob_id, future in self.start_fetch(slices, deadline_s).items()}

    def start_fetch(self, slices: Iterable[PayloadSlice], deadline_s: float) -> dict[str, Future]:
        """As `fetch`, but returns futures at once; each ends by the deadline and never raises."""
        deadline = time.monotonic() + deadline_s
        longest: dict[str, PayloadSlice] = {}
        for piece in slices:
            if piece.id not in longest or longest[piece.id].num_tokens < piece.num_tokens:
                longest[piece.id] = piece
        largest_first = sorted(longest.values(), key=lambda piece: -piece.nbytes)
        return {piece.id: self._threads.submit(self._fetch_one, piece, deadline) for piece in largest_first}

    def _fetch_one(self, piece: PayloadSlice, deadline: float) -> BranchArrays | PayloadError:
        try:
            arrays = self._read_local(piece) or self._fetch_http(piece, deadline)
            _check_slice(arrays, piece)
        except PayloadError as error:
            with self._lock:
                self.counts.failed += 1
            return error
        with self._lock:
            self.counts.blobs += 1
        return cut(arrays, piece.num_tokens)

    def _read_local(self, piece: PayloadSlice) -> BranchArrays | None:
        local = self._stores.local(piece) if self._map_local else None
        blob = local.open(piece.id) if local is not None else None
        if blob is None or blob.nbytes != piece.nbytes:
            return None
        try:
            arrays, size = self._read(blob.read_into, piece)
        except Freed:
            return None  # over HTTP it is a 404 that names it
        with self._lock:
            self.counts.bytes_mapped += size
        return arrays

    def _fetch_http(self, piece: PayloadSlice, deadline: float) -> BranchArrays:
        def attempt(connection: Connection, try_deadline: float) -> BranchArrays:
            def read(target: Target, span: tuple[int, int] | None = None) -> np.ndarray:
                return connection.read_into(f"/{piece.id}", target, try_deadline, span)

            arrays, size = self._read(read, piece)
            with self._lock:
                self.counts.bytes_http += size
            return arrays

        return self._with_retries(piece, deadline, _TRY_S, attempt)

    def _read(self, read: ReadInto, piece: PayloadSlice) -> tuple[BranchArrays, int]:
        """The arrays that are needed of a blob, and their bytes: all of it, or the kept prefix."""
        if is_worth_cutting(piece.num_tokens, piece.total_tokens, piece.nbytes):
            arrays = read_prefix(read, piece.num_tokens, piece.nbytes, self._buffers)
            return arrays, sum(array.nbytes for array in arrays.present().values())
        whole = read(self._buffers.take)
        return decode(whole.data), len(whole)

    def _with_retries(
        self,
        ref: PayloadSlice | PayloadRef,
        deadline: float,
        try_s: float,
        attempt: Callable[[Connection, float], T],
    ) -> T:
        """`attempt` on a connection, again after failures that may pass, until the deadline."""
        pause, last, url = _FIRST_PAUSE_S, "", ""
        while not self._closing.is_set():
            fresh = True
            try:
                url = self._stores.url(ref)
                try_deadline = min(deadline, time.monotonic() + try_s)
                with self._pool.lend(url, try_deadline) as connection:
                    fresh = connection.used == 0
                    return attempt(connection, try_deadline)
            except ServiceAnswer as answer:
                last = str(answer)
                if answer.status < 500 and answer.status not in (408, 429):
                    raise PayloadError(f"payload {ref.id} of {url}: {answer}") from None
            except OSError as error:
                last = str(error) or type(error).__name__
                if not fresh:  # the service was started again: old connections are dead, a new one may do
                    self._pool.drop(url)
            with self._lock:
                self.counts.retries += 1
            wait = 0.0 if not fresh else pause * random.uniform(0.5, 1.5)
            if time.monotonic() + wait >= deadline:
                break
            if fresh:
                self._closing.wait(wait)
                pause = min(2 * pause, _LAST_PAUSE_S)
        raise PayloadError(
            f"payload {ref.id} of {url} could not be had in time: {last or 'client closed'}", final=False
        )

    def release(self, refs: Iterable[PayloadRef | PayloadSlice], by: str, deadline_s: float = 10.0) -> int:
        """Free payloads as holder `by`, and what earlier calls could not deliver; how many were delivered.

        Waits at most `deadline_s`. Delivered: the store answered, be it that the id is unknown or was freed.
        """
        if by not in HOLDERS:
            raise PayloadError(f"holder {by!r} is not one of {', '.join(HOLDERS)}")
        deadline = time.monotonic() + deadline_s
        with self._lock:
            for ref in refs:
                self._pending.setdefault((ref.id, by), (PayloadRef(ref.url, ref.store, ref.id), by))
            orders: dict[tuple[str, str, str], list[PayloadRef]] = defaultdict(list)
            for ref, holder in self._pending.values():
                orders[ref.store, ref.url, holder].append(ref)
        futures = [
            self._threads.submit(self._release_chunk, refs[start : start + _RELEASE_CHUNK], holder, deadline)
            for (_, _, holder), refs in orders.items()
            for start in range(0, len(refs), _RELEASE_CHUNK)
        ]
        delivered = sum(future.result() for future in futures)
        self._stores.sweep()
        return delivered

    def _release_chunk(self, refs: Sequence[PayloadRef], by: str, deadline: float) -> int:
        body = msgspec.json.encode({"ids": [ref.id for ref in refs], "by": by})
        try:
            self._with_retries(
                refs[0],
                deadline,
                _RELEASE_TRY_S,
                lambda connection, at: connection.call("POST", "/release", body, at),
            )
        except PayloadError:
            return 0  # stays pending
        with self._lock:
            delivered = [self._pending.pop((ref.id, by), None) for ref in refs]
        return sum(entry is not None for entry in delivered)

    @property
    def pending_releases(self) -> list[tuple[PayloadRef, str]]:
        """(reference, holder) of every release that no store has answered yet."""
        with self._lock:
            return list(self._pending.values())

    def ledger(self, url: str, deadline_s: float = 10.0) -> Ledger:
        """The account of the store at `url`. Raises PayloadError when it does not answer."""
        return msgspec.json.decode(self.stats(url, deadline_s), type=Ledger)

    def stats(self, url: str, deadline_s: float = 10.0, *, outstanding: int = 0) -> bytes:
        """The JSON answer of `/stats`, with the `outstanding` oldest blobs under `held`."""
        path = f"/stats?outstanding={outstanding}" if outstanding else "/stats"
        return self._with_retries(
            PayloadRef(url, "", "stats"),
            time.monotonic() + deadline_s,
            _RELEASE_TRY_S,
            lambda connection, at: connection.call("GET", path, b"", at),
        )

    def close(self) -> None:
        """End all threads and connections. Calls under way end with an error."""
        self._closing.set()
        self._pool.close()
        self._threads.shutdown(wait=True)
        self._stores.close()

    def __enter__(self) -> PayloadClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_slice(arrays: BranchArrays, piece: PayloadSlice) -> None:
    if arrays.num_tokens < piece.num_tokens:
        raise PayloadError(
            f"payload {piece.id} has {arrays.num_tokens} tokens, {piece.num_tokens} are to be trained"
        )
    if tuple(arrays.present()) != tuple(name for name in arrays.present() if name in piece.fields):
        raise PayloadError(
            f"payload {piece.id} holds {tuple(arrays.present())}, the reference names {piece.fields}"
        )
    if arrays.routing != (tuple(piece.routing) if piece.routing else None):
        raise PayloadError(
            f"payload {piece.id} has routing {arrays.routing}, the reference says {piece.routing}"
        )
