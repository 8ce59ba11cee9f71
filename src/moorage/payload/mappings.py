"""Blob files mapped for reading; their page tables are kept, since most files come again (`recycle.py`).

Promises:
- bytes that `LocalBlob.read_into` hands over are the blob's: they are copied out of the mapping, and then the
  path must still name the file. Who takes a file's `memory` instead has to copy and look in that order too;
- mapped files are bounded in bytes and number; one that has no name left (unlinked, its memory held by the
  mapping alone) is let go at the next use or `sweep`.

Does not know: journals, which blobs are kept.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM
from moorage.payload.buffers import Target
from moorage.payload.recycle import holds, names

MAX_MAPPED_BYTES = 1 << 31
_MAX_FILES = 200  # two descriptors each
_SWEEP_S = 0.5


class Freed(Exception):
    """The blob's path names another file, or none, by now."""


class _Mapped(NamedTuple):
    fd: int
    memory: np.ndarray


class LocalBlob:
    """A blob's file, mapped. `nbytes`: the blob's size; the file may be longer."""

    def __init__(self, path: Path, nbytes: int, found: os.stat_result, memory: np.ndarray) -> None:
        self.nbytes = nbytes
        self._path = path
        self._found = found
        self._memory = memory

    def read_into(self, target: Target, span: tuple[int, int] | None = None) -> np.ndarray:
        """Copy the blob (of it bytes `span`) into `target`.

        Raises Freed when the blob was freed meanwhile: what is in `target` then is anybody's.
        """
        start, stop = span or (0, self.nbytes)
        if stop > self.nbytes:
            raise PayloadError(f"payload file {self._path}: byte {stop} of {self.nbytes} is asked for")
        buffer = target(stop - start) if callable(target) else target
        np.copyto(buffer, self._memory[start:stop])
        if not names(self._path, self._found):
            raise Freed(str(self._path))
        return buffer


class Mappings:
    """The files that are mapped. Safe to use from several threads."""

    def __init__(self, max_bytes: int = MAX_MAPPED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int], _Mapped] = OrderedDict()
        self._swept = 0.0

    def open(self, path: Path, nbytes: int) -> LocalBlob | None:
        """The blob of `nbytes` at `path`; None when its file is not there whole."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            whole = holds(found.st_size, nbytes)
            return LocalBlob(path, nbytes, found, self.memory(fd, found)) if whole else None
        except (OSError, ValueError):  # it cannot be mapped, or is empty
            return None
        finally:
            os.close(fd)

    def memory(self, fd: int, found: os.stat_result) -> np.ndarray:
        """The whole of an open file, whose fstat result is `found`. Raises OSError when it cannot be mapped.

        A small one is mapped for this use only, since it is never written over.
        """
        key = (found.st_dev, found.st_ino)
        with self._lock:
            self._sweep_now_and_then()
            mapped = self._files.get(key)
            if mapped is not None and len(mapped.memory) >= found.st_size:
                self._files.move_to_end(key)
                return mapped.memory
            whole = mmap.mmap(fd, found.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            memory = np.frombuffer(whole, np.uint8)
            if found.st_size >= RECYCLED_FROM:
                self._forget(self._files.pop(key, None))  # the file has grown since
                self._files[key] = _Mapped(os.dup(fd), memory)
                self._bound()
            return memory

    def _sweep_now_and_then(self) -> None:
        if time.monotonic() - self._swept > _SWEEP_S:
            self._sweep()

    def sweep(self) -> None:
        """Let go of files without a name."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        for key, mapped in list(self._files.items()):
            if os.fstat(mapped.fd).st_nlink == 0:
                self._forget(self._files.pop(key))
        self._swept = time.monotonic()

    def _bound(self) -> None:
        total = self.mapped_bytes
        while total > self._max_bytes or len(self._files) > _MAX_FILES:
            _, oldest = self._files.popitem(last=False)
            total -= len(oldest.memory)
            self._forget(oldest)

    def _forget(self, mapped: _Mapped | None) -> None:
        if mapped is not None:
            os.close(mapped.fd)  # the memory goes with the last copy that is being made out of it

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the files that stay mapped."""
        return sum(len(mapped.memory) for mapped in self._files.values())

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._forget(self._files.popitem()[1])
