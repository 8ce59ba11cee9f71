"""Keys and values of running sequences, one slot each.

Layout: [layers, slots, kv heads, length, dim], so that a layer's share of the first n slots and first m positions
is one strided view, which attention reads without a copy. Promises:
- slots 0..n-1 are the running ones: the scheduler moves the last into a gap (`move`);
- a position at or beyond a sequence's length is never looked at, whatever it holds; memory starts at zero, so
  that what is masked is at least finite;
- it grows by doubling, up to what was asked for, and holds no more than was ever needed.

Routing rows (the experts that each position chose) lie beside the keys under the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MIN_LENGTH = 64
MIN_SLOTS = 8


@dataclass(slots=True)
class Block:
    """A copy of one sequence's first positions: key and value [layers, kv heads, length, dim], rows [length, ...]."""

    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + (0 if self.rows is None else self.rows.nbytes)


class SlotCache:
    """Duck-typed transformers cache. `begin_*` says what the next forward writes and reads."""

    is_compileable = False

    def __init__(self, num_layers: int, row_shape: tuple[int, ...] | None, row_dtype: torch.dtype) -> None:
        self.num_layers = num_layers
        self.slots = 0
        self.length = 0
        self.key: torch.Tensor | None = None
        self.value: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self._row_shape = row_shape
        self._row_dtype = row_dtype
        self._write: Any = None
        self._read = (0, 0, 0)
        self._fresh = False

    def reserve(self, slots: int, length: int) -> None:
        """Room for `slots` sequences of `length` positions, keeping what is there."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots = max(self.slots, _round_up(slots, MIN_SLOTS))
        self.length = max(self.length, _round_up(length, MIN_LENGTH))
        self.key, self.value = self._grow(self.key), self._grow(self.value)
        if self.rows is not None:
            grown = self.rows.new_zeros(self.slots, self.length, *self.rows.shape[2:])
            grown[: self.rows.shape[0], : self.rows.shape[1]] = self.rows
            self.rows = grown

    def _grow(self, old: torch.Tensor | None) -> torch.Tensor | None:
        if old is None:
            return None
        layers, slots, heads, length, dim = old.shape
        new = old.new_zeros(layers, self.slots, heads, self.length, dim)
        new[:, :slots, :, :length] = old
        return new

    def begin_fresh(self, base: int, count: int, num_queries: int) -> None:
        """The next forward fills positions 0..num_queries-1 of slots base..base+count-1 and reads only its own."""
        self._fresh = True
        self._read = (base, count, num_queries)

    def begin(self, base: int, count: int, positions: torch.Tensor, num_keys: int) -> None:
        """The next forward writes `positions` [count, queries] of slots from `base`, reads positions < num_keys."""
        self._fresh = False
        self._read = (base, count, num_keys)
        slots = torch.arange(base, base + count, device=positions.device)
        self._write = (slots[:, None], positions) if positions.shape[1] > 1 else (slots, positions[:, 0])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' hook: store one layer's keys and values [count, heads, queries, dim], return what to read."""
        if self.key is None or self.value is None:
            shape = (self.num_layers, self.slots, key.shape[1], self.length)
            self.key = key.new_zeros(*shape, key.shape[-1])
            self.value = value.new_zeros(*shape, value.shape[-1])
        base, count, num_keys = self._read
        keys, values = self.key[layer], self.value[layer]
        if self._fresh:
            keys[base : base + count, :, :num_keys] = key
            values[base : base + count, :, :num_keys] = value
            return key, value
        slots, positions = self._write
        if key.shape[2] == 1:
            keys[slots, :, positions] = key[:, :, 0]
            values[slots, :, positions] = value[:, :, 0]
        else:
            keys[slots, :, positions] = key.transpose(1, 2)
            values[slots, :, positions] = value.transpose(1, 2)
        return keys[base : base + count, :, :num_keys], values[base : base + count, :, :num_keys]

    def put_rows(self, chosen: torch.Tensor) -> None:
        """Routing rows [count, queries, layers, k] of the forward that just ran."""
        base, count, num_keys = self._read
        if self.rows is None:
            assert self._row_shape is not None
            self.rows = chosen.new_zeros(self.slots, self.length, *self._row_shape, dtype=self._row_dtype)
        chosen = chosen.to(self._row_dtype)
        if self._fresh:
            self.rows[base : base + count, :num_keys] = chosen
            return
        slots, positions = self._write
        self.rows[slots, positions] = chosen if positions.ndim == 2 else chosen[:, 0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over slot `target`."""
        for buffer in (self.key, self.value):
            if buffer is not None:
                buffer[:, target, :, :length] = buffer[:, source, :, :length]
        if self.rows is not None:
            self.rows[target, :length] = self.rows[source, :length]

    def copy_out(self, slot: int, length: int) -> Block:
        """A copy of the first `length` positions of `slot`."""
        assert self.key is not None
        assert self.value is not None
        return Block(
            self.key[:, slot, :, :length].clone(),
            self.value[:, slot, :, :length].clone(),
            None if self.rows is None else self.rows[slot, :length].clone(),
        )

    def copy_in(self, slot: int, block: Block, length: int) -> None:
        """Write the first `length` positions of `block` to `slot`."""
        assert self.key is not None
        assert self.value is not None
        self.key[:, slot, :, :length] = block.key[:, :, :length]
        self.value[:, slot, :, :length] = block.value[:, :, :length]
        if self.rows is not None and block.rows is not None:
            self.rows[slot, :length] = block.rows[:length]

    def get_seq_length(self, layer: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0


def _round_up(value: int, least: int) -> int:
    size = least
    while size < value:
        size *= 2
    return size
