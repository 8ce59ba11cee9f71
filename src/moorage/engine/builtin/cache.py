"""Keys and values of running sequences, one slot each.

Layout: [layers, slots, kv heads, length, dim], so that a layer's share of the first n slots and first m
positions is one strided view, which attention reads without a copy. Promises:
- slots 0..n-1 are the running ones: the scheduler moves the last into a gap (`move`);
- a position at or beyond a sequence's length is never looked at, whatever it holds; memory starts at zero, so
  that what is masked is at least finite;
- it grows by doubling, and holds no more than was ever needed.

Routing rows (the experts that each position chose) lie beside the keys under the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

MIN_LENGTH = 64
MIN_SLOTS = 8


@dataclass(slots=True)
class Block:
    """A copy of one sequence's first positions: key and value [layers, kv heads, length, dim], rows [length,
    layers, k]."""

    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + (0 if self.rows is None else self.rows.nbytes)


@dataclass(slots=True)
class Layout:
    """The queries of one forward, side by side in a single row of tokens.

    First one query for each of slots 0..decoding-1, at `decode_at` [decoding]; then a rectangle of `fed`
    rows x `width` queries for slots decoding..decoding+fed-1, at `fed_at` [fed, width]. `decode_keys` and
    `fed_keys`:
    how many keys per slot the two parts look at. `fresh`: the fed rows begin at position 0 and look at
    their own keys only.
    """

    decode_at: torch.Tensor
    decode_keys: int
    fed_at: torch.Tensor
    fed_keys: int
    fresh: bool
    cache: SlotCache
    positions: torch.Tensor = field(init=False)
    """[1, tokens]"""
    slots: torch.Tensor = field(init=False)
    """[tokens]"""
    _masks: dict[tuple[str, int | None], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = self.decode_at[None]
        self.slots = torch.arange(self.decoding + self.fed, device=self.device)
        if self.fed:
            self.positions = torch.cat((self.decode_at, self.fed_at.flatten()))[None]
            fed = self.slots[self.decoding :].repeat_interleave(self.width)
            self.slots = torch.cat((self.slots[: self.decoding], fed))

    @property
    def decoding(self) -> int:
        return self.decode_at.shape[0]

    @property
    def fed(self) -> int:
        return self.fed_at.shape[0]

    @property
    def width(self) -> int:
        return self.fed_at.shape[1]

    @property
    def device(self) -> torch.device:
        return self.decode_at.device

    def decode_mask(self, sliding: int | None) -> torch.Tensor:
        """bool [decoding, 1, 1, decode_keys], True where a query may look."""
        return self._mask(("decode", sliding), self.decode_at[:, None], self.decode_keys)

    def fed_mask(self, sliding: int | None) -> torch.Tensor:
        """bool [fed, 1, width, fed_keys], True where a query may look."""
        return self._mask(("fed", sliding), self.fed_at, self.fed_keys)

    def _mask(self, name: tuple[str, int | None], at: torch.Tensor, num_keys: int) -> torch.Tensor:
        if name not in self._masks:
            keys = torch.arange(num_keys, device=at.device)
            at = at[:, None, :, None]
            allowed = keys <= at
            if name[1] is not None:
                allowed &= keys > at - name[1]
            self._masks[name] = allowed
        return self._masks[name]


class SlotCache:
    """Duck-typed transformers cache: `begin` says where the next forward writes, `update` writes one
    layer."""

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
        self._layout: Layout
        self._index: torch.Tensor | None = None
        self._layer = 0

    def reserve(self, slots: int, length: int) -> None:
        """Room for `slots` sequences of `length` positions, keeping what is there."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots = _round_up(max(slots, self.slots), MIN_SLOTS)
        self.length = _round_up(max(length, self.length), MIN_LENGTH)
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

    def begin(self, layout: Layout) -> None:
        """The next forward is `layout`; room for it has been reserved."""
        self._layout = layout
        self._index = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' hook: store one layer's keys and values [1, heads, tokens, dim]; they are given
        back."""
        if self.key is None or self.value is None:
            shape = (self.num_layers, self.slots, key.shape[1], self.length)
            self.key = key.new_zeros(*shape, key.shape[-1])
            self.value = value.new_zeros(*shape, value.shape[-1])
        self._layer = layer
        self._write(self.key[layer], key[0])
        self._write(self.value[layer], value[0])
        return key, value

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        """buffer [slots, heads, length, dim], new [heads, tokens, dim]."""
        slots, heads, length, dim = buffer.shape
        index = self._flat_index(heads, length)
        buffer.view(slots * heads * length, dim).index_copy_(0, index, new.transpose(0, 1).reshape(-1, dim))

    def _flat_index(self, heads: int, length: int) -> torch.Tensor:
        """Where the keys of the layout's queries go in a layer's buffer seen as [slots * heads * length,
        dim]."""
        if self._index is None or self._index.shape[0] != heads * len(self._layout.slots):
            first = self._layout.slots[:, None] * heads + torch.arange(heads, device=self._layout.device)
            self._index = (first * length + self._layout.positions.T).flatten()
        return self._index

    def decode_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [decoding, heads, decode_keys, dim] of the layer that was updated last."""
        n, m = self._layout.decoding, self._layout.decode_keys
        assert self.key is not None
        assert self.value is not None
        return self.key[self._layer, :n, :, :m], self.value[self._layer, :n, :, :m]

    def fed_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [fed, heads, fed_keys, dim] of the layer that was updated last."""
        n, m = self._layout.decoding, self._layout.fed_keys
        slots = slice(n, n + self._layout.fed)
        assert self.key is not None
        assert self.value is not None
        return self.key[self._layer, slots, :, :m], self.value[self._layer, slots, :, :m]

    def put_rows(self, chosen: torch.Tensor) -> None:
        """Routing rows [tokens, layers, k] of the forward that just ran."""
        layout = self._layout
        if self.rows is None:
            assert self._row_shape is not None
            shape = (self.slots, self.length, *self._row_shape)
            self.rows = chosen.new_zeros(shape, dtype=self._row_dtype)
        self.rows[layout.slots, layout.positions[0]] = chosen.to(self._row_dtype)

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
