"""The spool: one env server's blobs as files (`folders.py`), and the account of them (`account.py`).

Every process of the env server (broker, workers) has its own `Spool` on the same folder. Promises:

- `keep` holds the byte budget over all processes: it waits for room, then fails with the reason;
- whoever dies at whatever instant, `discard(request)` removes what the request had and counts what was kept;
- a keep that loses the race against a discard of its request leaves nothing and raises `PayloadError`;
- every failure of the disk (full, read-only, folder gone) is a `PayloadError` that names the folder;
- held and recycled files together stay in the budget; recycled ones go first when a keep needs the room.

Order inside `keep`: reserve in the journal and take a recycled file (both under its lock, so the budget is
exact), write, rename, say kept. Order inside a free: journal first, then unlink or recycle; `sweep` finishes
what a kill left between the two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from moorage.core.errors import PayloadError
from moorage.payload.account import Account, Entry, Outcome, footprint
from moorage.payload.codec import Buffer, nbytes_of
from moorage.payload.folders import (
    SUFFIX,
    TMPFS,
    attempt_keys,
    check_name,
    choose_spool_root,
    has_room,
    make_folder,
    owner_lives,
    remove_attempt,
    remove_folder,
    temporary_of,
    write_blob,
    write_owner,
)
from moorage.payload.journal import JOURNAL_NAME, Journal, JournalFull
from moorage.payload.recycle import Recycled, read_nbytes
from moorage.records.payload import Ledger

__all__ = ["SUFFIX", "TMPFS", "Spool", "attempt_keys", "choose_spool_root", "has_room", "remove_attempt"]

ADOPTED = "adopted"
_ID = re.compile(r"[0-9a-f]{32}")
_POLL_S = 0.02
_RECYCLE_WAIT_S = 0.005


class Spool:
    """A process's handle on one attempt's spool. Safe to use from several threads."""

    def __init__(
        self,
        root: Path | str,
        attempt_key: str,
        budget_bytes: int = 0,
        *,
        create: bool = True,
        writable: bool = True,
        remember: int = 0,
    ) -> None:
        """Open (`create`: make) `<root>/<attempt_key>`. Raises PayloadError naming the folder.

        `remember`: how many freed ids to keep in mind, 0 in processes that only keep and discard.
        """
        self.root = Path(root)
        self.folder = self.root / check_name(attempt_key, "attempt key")
        self.budget_bytes = budget_bytes
        if create:
            make_folder(self.folder)
        self._journal = Journal(self.folder / JOURNAL_NAME, create=create, writable=writable)
        self._account = Account(remember)
        self._recycled = Recycled(self.folder)
        self._lock = threading.RLock()

    def own(self) -> None:
        """Write down that this process is the env server whose spool this is."""
        write_owner(self.folder)

    def keep(
        self,
        request_id: str,
        buffers: Sequence[Buffer],
        timeout_s: float = 60.0,
        given_up: threading.Event | None = None,
    ) -> str:
        """Write one blob under `request_id` and return its id (32 hex digits). Blocks: call it in a thread.

        Waits at most `timeout_s`, or until `given_up`, for room in the budget. Raises PayloadError: no room,
        given up, disk failure, or the request was discarded meanwhile. After an error nothing of the blob is
        left.
        """
        blob_id = secrets.token_hex(16)
        folder = self.folder / check_name(request_id, "request id")
        given_up = given_up or threading.Event()
        path = folder / f"{blob_id}{SUFFIX}"
        over = self._reserve(path, nbytes_of(buffers), time.monotonic() + timeout_s, given_up)
        try:
            self._write(path, buffers, over)
            self._append("K", blob_id)
        except BaseException as error:
            with contextlib.suppress(OSError, PayloadError):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError, PayloadError):
                self._append("X", blob_id)
            if isinstance(error, OSError):
                self._check_discarded(request_id, folder)
                raise PayloadError(
                    f"payload cannot be written to {self.folder}: {error.strerror or error}"
                ) from error
            raise
        self._check_discarded(request_id, folder)
        return blob_id

    def _write(self, path: Path, buffers: Sequence[Buffer], over: bool) -> None:
        try:
            write_blob(path, buffers, over=over)
        except OSError as error:
            made_room = error.errno == errno.ENOSPC and self._recycled.clear() > 0
            if not (over or made_room):  # whatever ails a file that was taken, a new one may do
                raise
            temporary_of(path).unlink(missing_ok=True)
            write_blob(path, buffers)

    def _reserve(self, path: Path, nbytes: int, deadline: float, given_up: threading.Event) -> bool:
        """Take room for the blob at `path`; whether a recycled file lies at its temporary name."""
        request_id, blob_id, room = path.parent.name, path.stem, footprint(nbytes)
        if room > self.budget_bytes:
            raise PayloadError(
                f"a payload of {nbytes} bytes is larger than the whole spool budget of {self.budget_bytes}; "
                f"raise payload.spool_budget_mib"
            )
        while True:
            if given_up.is_set():
                raise PayloadError(f"request {request_id} was given up while its payloads were kept")
            with self._lock, self._journal.lock(deadline):
                self._catch_up()
                if (spare := self.budget_bytes - self._account.held_bytes - room) >= 0:
                    self._journal.append("R", f"{time.time():.3f}", blob_id, request_id, str(nbytes))
                    over = self._recycled.take(nbytes, temporary_of(path), spare)
                    break
                held = self._account.held_bytes
            if time.monotonic() > deadline:
                raise PayloadError(
                    f"spool {self.folder} is full: {held} of {self.budget_bytes} bytes are held and none was "
                    f"freed in time for {nbytes} more; raise payload.spool_budget_mib or free sooner"
                )
            given_up.wait(_POLL_S)
        self._check_discarded(request_id, path.parent)
        return over

    def _check_discarded(self, request_id: str, folder: Path) -> None:
        self.catch_up()
        if request_id in self._account.discarded:
            remove_folder(folder)
            raise PayloadError(f"request {request_id} was discarded while its payloads were kept")

    def discard(self, request_id: str, holder: str = "env_server") -> int:
        """Free all that was and will be kept under `request_id`; the number of blobs freed by this call."""
        check_name(request_id, "request id")
        event = ("D", f"{time.time():.3f}", holder, request_id)
        try:
            outcome = self._record(*event)
        except JournalFull:  # nothing would ever be freed again: make room first
            self._recycled.clear()
            remove_folder(self.folder / request_id)
            outcome = self._record(*event)
        remove_folder(self.folder / request_id)
        return len(outcome.freed)

    def free(self, blob_ids: Iterable[str], holder: str, *, unlink: bool = True) -> Outcome:
        """Free single blobs; what happened to them. Without `unlink` the files are the caller's to remove."""
        total = Outcome()
        ids = list(blob_ids)
        for start in range(0, len(ids), 64):
            chunk = ids[start : start + 64]
            event = ("F", f"{time.time():.3f}", holder, *chunk)
            try:
                outcome = self._record(*event)
            except JournalFull:  # nothing would ever be freed again: make room first
                self._recycled.clear()
                for entry in filter(None, map(self.find, chunk)):
                    self.remove_file(entry)
                outcome = self._record(*event)
            for entry in outcome.freed if unlink else ():
                self.remove_file(entry)
            total.freed += outcome.freed
            total.repeated += outcome.repeated
            total.double += outcome.double
            total.unknown += outcome.unknown
        return total

    def discard_all(self, holder: str, retain: Iterable[str] = ()) -> int:
        """Free everything but the blobs named in `retain`; the number of blobs freed."""
        keep = frozenset(retain)
        self.catch_up()
        with self._lock:
            requests = {request: list(entries) for request, entries in self._account.requests.items()}
        freed = 0
        for request, ids in requests.items():
            if keep.isdisjoint(ids):
                freed += self.discard(request, holder)
            else:
                freed += len(self.free([blob_id for blob_id in ids if blob_id not in keep], holder).freed)
        self._recycled.clear()
        return freed

    def adopt(self, blob_ids: Iterable[str]) -> tuple[str, ...]:
        """Move blobs of earlier attempts (found by file name) into this one; the ids that were found."""
        wanted = {blob_id for blob_id in blob_ids if _ID.fullmatch(blob_id)}
        target = self.folder / ADOPTED
        adopted = []
        for path in self.root.glob(f"*/*/*{SUFFIX}"):
            blob_id = path.name[: -len(SUFFIX)]
            if blob_id in wanted and path.parent.parent != self.folder:
                if (nbytes := read_nbytes(path)) is None:
                    continue
                make_folder(target)
                with self._lock:
                    self._record("R", f"{time.time():.3f}", blob_id, ADOPTED, str(nbytes))
                    os.replace(path, target / path.name)
                    self._record("K", blob_id)
                adopted.append(blob_id)
        return tuple(sorted(adopted))

    def lost_attempts(self) -> list[str]:
        """Keys of the other attempts in this root whose env server is dead."""
        return [
            key
            for key in attempt_keys(self.root)
            if key != self.folder.name and not owner_lives(self.root / key)
        ]

    def remove_attempt(self, attempt_key: str) -> None:
        """Remove another attempt's folder, after saying so in its journal."""
        remove_attempt(self.root, attempt_key)

    def sweep(self) -> int:
        """Remove files that the journal says are free (a kill came between journal and unlink); how many."""
        paths = list(self.folder.glob(f"*/*{SUFFIX}"))
        self.catch_up()  # after the listing: a file's reservation is written before the file
        free = [path for path in paths if path.name[: -len(SUFFIX)] not in self._account.entries]
        for path in free:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in free}:
            if folder.name in self._account.discarded:
                remove_folder(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
        return len(free)

    def path_of(self, entry: Entry) -> Path:
        return self.folder / entry.request / f"{entry.id}{SUFFIX}"

    def remove_file(self, entry: Entry) -> None:
        """Unlink a freed blob, and its request's folder with the last of them."""
        path = self.path_of(entry)
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def recycle_file(self, entry: Entry) -> None:
        """Have a freed blob's file wait for a later blob, or unlink it.

        What is held and what waits together never pass the most that was ever held.
        """
        with contextlib.suppress(OSError, PayloadError), self._lock:
            self._put(entry)
        self.remove_file(entry)

    def _put(self, entry: Entry) -> None:
        if self.ended or not self._recycled.suits(entry.nbytes):
            return
        with self._journal.lock(time.monotonic() + _RECYCLE_WAIT_S):
            self._catch_up()
            room = self._account.peak_bytes - self._account.held_bytes
            self._recycled.put(self.path_of(entry), entry.nbytes, room)

    def drop_recycled(self) -> None:
        """Unlink the files that wait."""
        self._recycled.clear()

    def find(self, blob_id: str) -> Entry | None:
        """The entry of a kept blob, None when it is unknown or freed."""
        self.catch_up()
        entry = self._account.entries.get(blob_id)
        return entry if entry is not None and entry.complete else None

    def is_known(self, blob_id: str) -> bool:
        """Whether the blob was ever kept in this attempt (needs `remember`)."""
        self.catch_up()
        return self._account.is_known(blob_id)

    def mark_damaged(self, blob_id: str) -> None:
        """Count a kept blob that was found missing or cut short."""
        self._record("M", blob_id)

    def ledger(self) -> Ledger:
        self.catch_up()
        with self._lock:
            return self._account.ledger(time.time())

    def outstanding(self) -> list[Entry]:
        """Kept blobs that nobody has freed, oldest first."""
        self.catch_up()
        with self._lock:
            return list(self._account.kept())

    @property
    def ended(self) -> bool:
        return self._account.ended

    def catch_up(self) -> None:
        """Take in what all processes have written since."""
        with self._lock:
            self._catch_up()

    def _catch_up(self, tag: str | None = None) -> Outcome:
        mine = Outcome()
        for event in self._journal.read_new():
            outcome = self._account.apply(event)
            if event.tag == tag:
                mine = outcome
        return mine

    def _append(self, kind: str, *fields: str) -> str:
        return self._journal.append(kind, *fields)

    def _record(self, kind: str, *fields: str) -> Outcome:
        with self._lock:
            return self._catch_up(self._journal.append(kind, *fields))

    def close(self) -> None:
        with self._lock:
            self._journal.close()
