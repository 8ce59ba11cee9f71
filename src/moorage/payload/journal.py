"""The journal: an append-only file of what happened to the payloads of one attempt, shared by many writers.

Workers write what they keep, the service writes what is freed, the broker writes what is discarded; any of
them may be killed at any instant. Promises:

- an event counts when its line is whole; the order of the lines is the order of events for every reader;
- a torn line (its writer was killed, or the disk was full) hurts no other line;
- nobody needs to read before writing: what a line means is decided by the lines above it (`account.py`).

One line, written by one `write` on a descriptor opened with O_APPEND:

    "\\n" crc32 " " kind " " tag " " fields joined by " " "\\n"

`crc32`: 8 hex digits over everything after it (without the newline). The leading newline ends a torn line of
somebody else, so blank lines are normal. `tag`: writer and serial number, `<hex pid>.<hex start>.<hex n>`, by
which a writer finds its own line again. Kinds and fields:

    R  time  blob-id  request-id  nbytes    room is reserved for a blob (it counts against the budget)
    K  blob-id                              the blob is complete under its final name: it is kept
    X  blob-id                              the reservation is given up: the keep failed
    F  time  holder  blob-id [blob-id ..]   the holder frees these blobs
    D  time  holder  request-id             the holder frees all that was and will be kept under this request
    M  blob-id                              the blob was found missing or cut short on disk
    E  time                                 the attempt is over, its folder is about to be removed

`time` is seconds since the epoch. Does not know: what the events add up to, blob files, HTTP.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moorage.core.errors import PayloadError

JOURNAL_NAME = "journal"
_READ_BYTES = 1 << 20
_serial = itertools.count(1)


class Event(NamedTuple):
    """One whole line."""

    kind: str
    tag: str
    fields: tuple[str, ...]


class JournalFull(PayloadError):
    """The file system has no room for one more line."""


class Journal:
    """One process's handle on a journal file: appends, and reads on from where it stopped.

    Not for use by several threads at once, but for `append`.
    """

    def __init__(self, path: Path, *, create: bool = False, writable: bool = True) -> None:
        """`create`: make the file when there is none. Raises PayloadError naming the file."""
        self.path = path
        self.torn = 0
        try:
            self._fd = _open(path, create=create, writable=writable)
        except OSError as error:
            raise PayloadError(f"payload journal {path} cannot be opened: {error.strerror}") from error
        self._offset = 0
        self._rest = b""
        self._writer = f"{os.getpid():x}.{time.time_ns() & 0xFFFFFFFFFF:x}"

    def append(self, kind: str, *fields: str) -> str:
        """Write one event and return its tag. Raises PayloadError when the disk does not take it."""
        tag = f"{self._writer}.{next(_serial):x}"
        line = make_line(Event(kind, tag, fields))
        for _ in range(2):  # a short write leaves a torn line; the second try is a line of its own
            try:
                if os.write(self._fd, line) == len(line):
                    return tag
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise PayloadError(
                        f"payload journal {self.path}: {error.strerror}", final=False
                    ) from error
        raise JournalFull(f"payload journal {self.path} cannot be written: no space left", final=False)

    def read_new(self) -> Iterator[Event]:
        """The events appended since the last call, by anybody. A line still being written waits."""
        size = os.fstat(self._fd).st_size
        while self._offset < size:
            chunk = os.pread(self._fd, min(_READ_BYTES, size - self._offset), self._offset)
            if not chunk:
                return
            self._offset += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    event = parse_line(line)
                    if event is None:
                        self.torn += 1
                    else:
                        yield event

    @contextmanager
    def lock(self, deadline: float) -> Iterator[None]:
        """Exclude the other processes that lock, waiting until `deadline` (monotonic) at most.

        The kernel drops the lock of a process that dies; one that is stopped inside is waited for, and then
        a PayloadError says so.
        """
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PayloadError(
                        f"payload journal {self.path} stays locked by another process; is a worker stopped?"
                    ) from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path, *, create: bool, writable: bool) -> int:
    flags = os.O_CLOEXEC | (os.O_CREAT if create else 0)
    if writable:
        try:
            return os.open(path, flags | os.O_RDWR | os.O_APPEND, 0o600)
        except OSError as error:
            if create or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
    return os.open(path, os.O_CLOEXEC | os.O_RDONLY)  # still good for reading; appends will say why not


def make_line(event: Event) -> bytes:
    """The bytes of one event."""
    body = " ".join((event.kind, event.tag, *event.fields)).encode()
    return b"\n%08x %b\n" % (zlib.crc32(body), body)


def parse_line(line: bytes) -> Event | None:
    """The event of a line without its newlines, or None when the line is torn."""
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        kind, tag, *fields = line[9:].decode().split(" ")
    except ValueError:
        return None
    return Event(kind, tag, tuple(fields))
