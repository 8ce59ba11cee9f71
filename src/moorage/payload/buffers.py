"""Memory that fetches land in, used again and again.

Fresh pages cost more than the copy into them (a page fault each, worse on virtual machines), so large buffers
come back when the last array that views them is gone, and serve the next fetch. Promises:
- a buffer is handed out again only when nothing views it any more;
- at most `max_idle_bytes` wait for the next user; the rest goes back to the system;
- small requests are plain arrays.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

MIN_POOLED_BYTES = 256 * 1024
_ROUND_BYTES = 1024 * 1024


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
            slab = np.empty(-(-nbytes // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
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
