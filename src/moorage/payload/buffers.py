"""Memory that fetches land in, used again and again.

Fresh pages cost more than the copy into them (a page fault each, worse on virtual machines), so large buffers
come back when the last array that views them is gone, and serve the next fetch. They lie on huge pages where
the system has them: receiving into ordinary pages took half as much processor time again. Promises:
- a buffer is handed out again only when nothing views it any more;
- at most `max_idle_bytes` wait for the next user; the rest goes back to the system;
- small requests are plain arrays.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

MIN_POOLED_BYTES = 256 * 1024
_PAGE_BYTES = 2 * 1024 * 1024

Target = np.ndarray | Callable[[int], np.ndarray]
"""Where a read puts its bytes: a uint8 array, or what makes one of a given size."""


class Buffers(Protocol):
    """Where fetched bytes go."""

    def take(self, nbytes: int) -> np.ndarray:
        """A uint8 array of `nbytes` that nobody else uses."""
        ...


class BufferPool:
    """Hands out uint8 arrays. Safe to use from several threads."""

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[np.ndarray] = []
        self._returned: deque[np.ndarray] = (
            deque()
        )  # filled by finalizers, which may run anywhere: no lock there

    def take(self, nbytes: int) -> np.ndarray:
        """An uninitialised uint8 array of `nbytes`."""
        if nbytes < MIN_POOLED_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            fitting = [i for i, slab in enumerate(self._idle) if nbytes <= len(slab) <= 2 * nbytes]
            best = min(fitting, key=lambda i: len(self._idle[i]), default=None)
            slab = None if best is None else self._idle.pop(best)
        if slab is None:
            slab = _make_slab(nbytes)
        # Over a memoryview, so that every view's base is `lent` and never the slab behind it.
        lent = np.frombuffer(slab.data, np.uint8, nbytes)
        weakref.finalize(lent, self._returned.append, slab).atexit = False
        return lent

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        idle = sum(map(len, self._idle))
        while idle > self._max_idle_bytes:
            idle -= len(self._idle.pop(0))

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait for their next user."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))


def _make_slab(nbytes: int) -> np.ndarray:
    """At least `nbytes` of memory on huge page boundaries; small ones are rounded up to a whole MiB only."""
    if nbytes < _PAGE_BYTES:
        return np.empty(-(-nbytes // (_PAGE_BYTES // 2)) * (_PAGE_BYTES // 2), np.uint8)
    size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, size + _PAGE_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _PAGE_BYTES
    return whole[start : start + size]
