"""What the payload service answers, without HTTP: all attempts that lie under one spool root.

Promises:
- an attempt whose folder appears is served without a restart (take-over), one whose journal ends is dropped;
- `free` is recorded before it is answered, so a service that is killed and started again knows it;
- a kept blob that is missing or cut short on disk is `Damaged`, counted, never served;
- a large blob is sent out of its mapping, by copying, and its last bytes only after a look that it is still
  there: its file may be written over meanwhile (`recycle.py`), and then no peer has a whole answer;
- memory of files that are gone is held for a second at most.

Safe to use from several threads. Does not know: sockets, tokens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM, REMEMBERED, Entry
from moorage.payload.mappings import Freed, Mappings
from moorage.payload.recycle import holds, names
from moorage.payload.spool import Spool, attempt_keys
from moorage.records.payload import Ledger

_LOOK_AGAIN_S = 0.01
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the blob is well, this process is not
_SWEEP_S = 1.0
_PIECE_BYTES = 1 << 21
_LAST_PIECE_BYTES = 1 << 16


class Damaged(Exception):
    """A kept blob cannot be read whole; the message names the file."""


class OpenBlob(NamedTuple):
    """A kept blob, opened to be sent: the first `nbytes` bytes of a file that may be longer.

    `memory`: the mapped file, which may be written over once the blob is freed. None for a small blob, whose
    file never is, and may be given to the kernel.
    """

    fd: int
    nbytes: int
    path: Path
    memory: np.ndarray | None

    def pieces(self, start: int, stop: int) -> Iterator[memoryview | bytes]:
        """Bytes `start:stop` to be copied, each piece before the next is asked for.

        Raises Freed in place of the last piece when what was handed out may be another blob's bytes. Then
        nothing was sent that a peer could take for the whole answer.
        """
        last = max(start, stop - _LAST_PIECE_BYTES)
        for at in range(start, last, _PIECE_BYTES):
            assert self.memory is not None
            yield self.memory.data[at : min(at + _PIECE_BYTES, last)]
        data = os.pread(self.fd, stop - last, last)
        if len(data) < stop - last or not names(self.path, os.fstat(self.fd)):
            raise Freed(str(self.path))
        yield data


def _no_room(path: Path, error: OSError) -> PayloadError:
    return PayloadError(f"payload file {path} cannot be opened just now: {error.strerror}", final=False)


class Released(msgspec.Struct):
    """Answer of a release: blobs freed by this call, ids that were never kept. Repeats are in neither."""

    freed: int
    unknown: int


class Held(msgspec.Struct):
    """One outstanding blob, for people."""

    id: str
    attempt: str
    request: str
    nbytes: int
    age_s: float


class Reaper:
    """Recycles or unlinks freed files in a thread of its own: giving back the pages of a large file takes
    milliseconds, and whoever frees a thousand should not wait for it. A kill leaves them to `Spool.sweep`.
    Between files, and every second, it lets go of the mappings of what is unlinked, by whomever."""

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        self._queue: queue.Queue[tuple[Spool, Entry] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="payload-reaper", daemon=True)
        self._thread.start()

    def add(self, spool: Spool, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._queue.put((spool, entry))

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_SWEEP_S)
            except queue.Empty:
                self._mappings.sweep()
                continue
            if item is None:
                return
            spool, entry = item
            spool.recycle_file(entry)
            if self._queue.empty():
                self._mappings.sweep()
            self._queue.task_done()

    def wait(self) -> None:
        """Until everything that was added is done."""
        self._queue.join()

    def close(self) -> None:
        """Do what is queued, then end."""
        self._queue.put(None)
        self._thread.join()


class Store:
    """The blobs under `root`."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._lock = threading.RLock()
        self._spools: dict[str, Spool] = {}
        self.refresh()
        for spool in self._spools.values():
            with contextlib.suppress(OSError):  # a read-only spool keeps what is free
                spool.sweep()
        self._mappings = Mappings()
        self._reaper = Reaper(self._mappings)

    def refresh(self) -> None:
        """Take in attempts that appeared, drop those that ended."""
        with self._lock:
            for key in attempt_keys(self.root):
                if key not in self._spools:
                    with contextlib.suppress(PayloadError):  # removed since it was listed
                        self._spools[key] = Spool(self.root, key, create=False, remember=REMEMBERED)
            for key, spool in list(self._spools.items()):
                spool.catch_up()
                if spool.ended:
                    del self._spools[key]
                    spool.close()

    def open(self, blob_id: str) -> OpenBlob | None:
        """A kept blob, None when it is unknown or freed. The descriptor is the caller's.

        Raises Damaged, and PayloadError when this process has no room for one more file.
        """
        for last in (False, False, True):
            located = self._locate(blob_id)
            if located is None:
                return None
            spool, entry = located
            path = spool.path_of(entry)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in _OURS:
                    raise _no_room(path, error) from error
                if not last:  # freed, or adopted by another attempt, since it was looked up
                    time.sleep(_LOOK_AGAIN_S)
                    self.refresh()
                    continue
                spool.mark_damaged(blob_id)
                raise Damaged(f"payload file {path}: {error.strerror}") from error
            found = os.fstat(fd)
            if holds(found.st_size, entry.nbytes):
                return self._prepare(fd, found, path, entry.nbytes)
            os.close(fd)
            spool.mark_damaged(blob_id)
            raise Damaged(
                f"payload file {path} has {found.st_size} bytes, {entry.nbytes} were kept: cut short on disk"
            )
        return None

    def _prepare(self, fd: int, found: os.stat_result, path: Path, nbytes: int) -> OpenBlob:
        try:
            memory = self._mappings.memory(fd, found) if nbytes >= RECYCLED_FROM else None
        except OSError as error:
            os.close(fd)
            raise _no_room(path, error) from error
        return OpenBlob(fd, nbytes, path, memory)

    def _locate(self, blob_id: str) -> tuple[Spool, Entry] | None:
        for refresh in (False, True):
            if refresh:
                self.refresh()
            with self._lock:
                for spool in reversed(self._spools.values()):
                    if (entry := spool.find(blob_id)) is not None and not spool.ended:
                        return spool, entry
        return None

    def free(self, blob_ids: Sequence[str], holder: str) -> Released:
        """Free blobs for `holder`, whatever attempt they belong to. The files go a moment later."""
        self.refresh()
        with self._lock:
            spools = list(reversed(self._spools.values()))
        if not spools:
            return Released(0, len(set(blob_ids)))
        owned: dict[int, list[str]] = {}
        for blob_id in dict.fromkeys(blob_ids):
            index = next((i for i, spool in enumerate(spools) if spool.is_known(blob_id)), 0)
            owned.setdefault(index, []).append(blob_id)
        released = Released(0, 0)
        for index, ids in owned.items():
            outcome = spools[index].free(ids, holder, unlink=False)
            self._reaper.add(spools[index], outcome.freed)
            released.freed += len(outcome.freed)
            released.unknown += outcome.unknown
        return released

    def settle(self) -> None:
        """Wait until the files of all that was freed are gone or wait for a later blob."""
        self._reaper.wait()

    def ledger(self) -> Ledger:
        """The sum over the attempts that are there."""
        self.refresh()
        total = Ledger()
        with self._lock:
            for spool in self._spools.values():
                total = total.add(spool.ledger())
        return total

    def outstanding(self, limit: int) -> list[Held]:
        """The oldest outstanding blobs."""
        self.refresh()
        now = time.time()
        with self._lock:
            held = [
                Held(entry.id, key, entry.request, entry.nbytes, max(0.0, now - entry.since))
                for key, spool in self._spools.items()
                for entry in spool.outstanding()
            ]
        return sorted(held, key=lambda item: -item.age_s)[:limit]

    def close(self) -> None:
        self._reaper.close()
        with self._lock:
            for spool in self._spools.values():
                spool.drop_recycled()
                spool.close()
            self._spools.clear()
        self._mappings.close()
