"""Prefixes computed before, to be taken over by later sequences that begin alike.

Pure bookkeeping: what a stored block is, only the caller knows (it needs `nbytes`). Promises:
- a hit is token for token equal, under the same salt; a hash only finds the candidate;
- everything in the store was computed by one version of the weights: the scheduler clears it when they
  change;
- it holds at most `budget_bytes`; what was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

BLOCK = 8
"""Shortest prefix worth finding, in tokens, and the step in which prefixes are looked up."""


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


BlockT = TypeVar("BlockT", bound=Sized)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[BlockT]):
    salt: str
    tokens: np.ndarray
    keys: tuple[int, ...]
    block: BlockT


class PrefixStore(Generic[BlockT]):
    """Longest common prefix over stored sequences."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[int, _Entry[BlockT]] = OrderedDict()
        self._index: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, salt: str, keys: tuple[int, ...], tokens: np.ndarray) -> tuple[int, BlockT | None]:
        """(number of leading `tokens` that a stored block covers, the block). `keys` are chain_keys(salt,
        tokens)."""
        number = None
        for key in keys:
            found = self._index.get(key)
            if found is None:
                break
            number = found
        if number is None:
            return 0, None
        entry = self._entries[number]
        shared = 0 if entry.salt != salt else _common(entry.tokens, tokens)
        if shared < BLOCK:
            return 0, None
        self._entries.move_to_end(number)
        return shared, entry.block

    def insert(self, salt: str, tokens: np.ndarray, block: BlockT) -> None:
        """Store the block of `tokens`, dropping the oldest entries when the budget is exceeded."""
        if block.nbytes > self.budget_bytes:
            return
        keys = chain_keys(salt, tokens)
        number, self._next = self._next, self._next + 1
        self._entries[number] = _Entry(salt, tokens, keys, block)
        self.used_bytes += block.nbytes
        for key in keys:
            self._index[key] = number
        while self.used_bytes > self.budget_bytes:
            self._evict()

    def _evict(self) -> None:
        number, entry = self._entries.popitem(last=False)
        self.used_bytes -= entry.block.nbytes
        for key in entry.keys:
            if self._index.get(key) == number:
                del self._index[key]

    def clear(self) -> None:
        self._entries.clear()
        self._index.clear()
        self.used_bytes = 0


def chain_keys(salt: str, tokens: np.ndarray) -> tuple[int, ...]:
    """One hash per whole block of `tokens`, each over everything before it and the salt."""
    keys = []
    key = hash(salt)
    data = tokens.tobytes()
    step = BLOCK * tokens.itemsize
    for start in range(0, len(data) - step + 1, step):
        key = hash((key, data[start : start + step]))
        keys.append(key)
    return tuple(keys)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
