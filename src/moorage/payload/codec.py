"""Arrays of one branch to one blob and back: a safetensors file that nothing here ever copies needlessly.

Owns: the names, dtypes and shapes of a branch's arrays, the layout of a blob, and the one cut.
Promises:
- `encode` refuses arrays that do not fit each other (`PayloadError` names field, dtype, shape); what it
  returns are the header and views of the given arrays, ready for `writev`;
- `decode` returns views of the given buffer and refuses every buffer that is not a whole blob;
- `decode(encode(a)) == a` byte for byte; any safetensors reader opens a blob;
- `cut` is the only place that shortens arrays: after it every field covers the same n tokens.

Wide elements come first in a blob, so every view is aligned. Does not know: files, HTTP, tokens' meaning.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import msgspec
import numpy as np

from moorage.core.errors import PayloadError

Buffer = bytes | bytearray | memoryview | mmap.mmap

MAX_HEADER_BYTES = 1 << 16
_HEADER_ALIGN = 16

DTYPES: dict[str, tuple[str, ...]] = {
    "token_ids": ("I32",),
    "logprobs": ("F32",),
    "sampling_counts": ("I32",),
    "sampling_ids": ("I32",),
    "head_ids": ("I32",),
    "head_logprobs": ("F32",),
    "routed_experts": ("U8", "U16"),
    "loss_mask": ("U8",),
    "content_mask": ("U8",),
}
"""Field to safetensors dtypes, in the order in which the fields lie in a blob."""

REQUIRED = ("token_ids", "loss_mask", "logprobs")
_TO_NUMPY = {"I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1")}
_FROM_NUMPY = {dtype: name for name, dtype in _TO_NUMPY.items()}
_NUM_DIMS = {"routed_experts": 3, "head_ids": 2, "head_logprobs": 2}


@dataclass(frozen=True, slots=True, eq=False)
class BranchArrays:
    """The per-token arrays of one branch. T tokens, of which S have `loss_mask` 1.

    Shapes: `token_ids` int32 [T], `loss_mask` uint8 [T], `logprobs` float32 [T], `content_mask` uint8 [T],
    `routed_experts` uint8 or uint16 [T, layers, k], `sampling_counts` int32 [T] with `sampling_ids` int32
    [sum of counts], `head_ids` int32 [S, k] (-1 pads) with `head_logprobs` float32 [S, k] (-inf pads).
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    content_mask: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    sampling_counts: np.ndarray | None = None
    sampling_ids: np.ndarray | None = None
    head_ids: np.ndarray | None = None
    head_logprobs: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        return int(self.loss_mask.sum(dtype=np.int64))

    @property
    def routing(self) -> tuple[int, int] | None:
        """(layers, k) of the routing rows, None without them."""
        rows = self.routed_experts
        return None if rows is None else (rows.shape[1], rows.shape[2])

    def present(self) -> dict[str, np.ndarray]:
        """The fields that are there, in blob order."""
        return {name: array for name in DTYPES if (array := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies: `offset` bytes into the blob."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check(arrays: BranchArrays) -> None:
    """Raise PayloadError unless every field has its dtype and fits the others."""
    for name, array in arrays.present().items():
        dtype = _FROM_NUMPY.get(array.dtype)
        if dtype not in DTYPES[name]:
            raise PayloadError(f"{name} has dtype {array.dtype}, expected one of {DTYPES[name]}")
        if array.ndim != _NUM_DIMS.get(name, 1):
            raise PayloadError(
                f"{name} has shape {array.shape}, expected {_NUM_DIMS.get(name, 1)} dimensions"
            )
    _check_lengths({name: array.shape for name, array in arrays.present().items()})
    if arrays.num_tokens and int(arrays.loss_mask.max()) > 1:
        raise PayloadError(f"loss_mask holds {int(arrays.loss_mask.max())}, expected only 0 and 1")
    if arrays.head_ids is not None and len(arrays.head_ids) != arrays.num_trainable:
        raise PayloadError(
            f"head_ids has {len(arrays.head_ids)} rows for {arrays.num_trainable} trained tokens"
        )
    counts, ids = arrays.sampling_counts, arrays.sampling_ids
    if counts is not None and ids is not None:
        if len(counts) and int(counts.min()) < 0:
            raise PayloadError(f"sampling_counts holds {int(counts.min())}, expected no negative count")
        if int(counts.sum(dtype=np.int64)) != len(ids):
            raise PayloadError(
                f"sampling_ids has {len(ids)} entries, sampling_counts add to {counts.sum(dtype=np.int64)}"
            )


def _check_lengths(shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in REQUIRED if name not in shapes]
    if missing:
        raise PayloadError(f"payload lacks {', '.join(missing)}")
    num_tokens = shapes["token_ids"][0]
    for name, shape in shapes.items():
        if name not in ("sampling_ids", "head_ids", "head_logprobs") and shape[0] != num_tokens:
            raise PayloadError(f"{name} has shape {shape}, but there are {num_tokens} tokens")
    for one, other in (("sampling_counts", "sampling_ids"), ("head_ids", "head_logprobs")):
        if (one in shapes) != (other in shapes):
            raise PayloadError(f"{one} and {other} come together: one of them is missing")
    if shapes.get("head_ids") != shapes.get("head_logprobs"):
        raise PayloadError(
            f"head_ids has shape {shapes['head_ids']}, head_logprobs {shapes['head_logprobs']}"
        )


def encode(arrays: BranchArrays) -> list[Buffer]:
    """The blob as buffers to be written one after the other: header, then one view per field.

    Copies only arrays that are not contiguous. Raises PayloadError when `check` does.
    """
    check(arrays)
    header: dict[str, dict[str, object]] = {}
    buffers: list[Buffer] = []
    offset = 0
    for name, array in arrays.present().items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        header[name] = {
            "dtype": _FROM_NUMPY[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + flat.nbytes],
        }
        offset += flat.nbytes
        if flat.nbytes:
            buffers.append(flat.data)
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGN)
    return [len(text).to_bytes(8, "little") + text, *buffers]


def nbytes_of(buffers: Sequence[Buffer]) -> int:
    """Total size of what `encode` returned."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def header_nbytes(prefix: Buffer) -> int:
    """Size of length word and header, from the first 8 bytes of a blob."""
    size = int.from_bytes(bytes(memoryview(prefix)[:8]), "little")
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise PayloadError(f"blob header claims {size} bytes, expected 2 to {MAX_HEADER_BYTES}: not a blob")
    return 8 + size


def read_layout(head: Buffer) -> dict[str, FieldLayout]:
    """Field to layout, from the leading `header_nbytes` bytes of a blob (more may follow)."""
    view = memoryview(head).cast("B")
    start = header_nbytes(view)
    if len(view) < start:
        raise PayloadError(f"blob is {len(view)} bytes long, its header alone has {start}: cut short")
    try:
        entries = msgspec.json.decode(view[8:start], type=dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise PayloadError(f"blob header cannot be read: {error}") from None
    layout, at = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES.get(name, ()):
            raise PayloadError(f"blob field {name!r} of dtype {entry.dtype!r} is not of this format")
        if len(entry.shape) != _NUM_DIMS.get(name, 1) or min(entry.shape) < 0:
            raise PayloadError(f"blob field {name} has shape {entry.shape}")
        field = FieldLayout(_TO_NUMPY[entry.dtype], tuple(entry.shape), start + at)
        if entry.data_offsets != (at, at + field.nbytes):
            raise PayloadError(
                f"blob field {name} lies at {entry.data_offsets}, expected {at} and {field.nbytes} bytes"
            )
        at += field.nbytes
        layout[name] = field
    _check_lengths({name: field.shape for name, field in layout.items()})
    return layout


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def blob_nbytes(layout: Mapping[str, FieldLayout]) -> int:
    """Size of the whole blob of this layout."""
    return max(field.offset + field.nbytes for field in layout.values())


def decode(buffer: Buffer) -> BranchArrays:
    """The arrays of a whole blob, as views of `buffer`. Raises PayloadError for anything else."""
    layout = read_layout(buffer)
    size = memoryview(buffer).nbytes
    if size != blob_nbytes(layout):
        raise PayloadError(
            f"blob is {size} bytes long, its header describes {blob_nbytes(layout)}: cut short"
        )
    arrays = BranchArrays(**{name: _view(buffer, field) for name, field in layout.items()})
    check(arrays)
    return arrays


def _view(buffer: Buffer, field: FieldLayout) -> np.ndarray:
    count = math.prod(field.shape)
    if count == 0:
        return np.empty(field.shape, field.dtype)
    return np.frombuffer(buffer, field.dtype, count, field.offset).reshape(field.shape)


def cut(arrays: BranchArrays, num_tokens: int) -> BranchArrays:
    """The first `num_tokens` tokens of every field, as views.

    Heads keep one row per trained token that is left, sampling ids those of the tokens that are left.
    Raises PayloadError when there are fewer tokens.
    """
    if not 0 <= num_tokens <= arrays.num_tokens:
        raise PayloadError(f"cannot keep {num_tokens} of {arrays.num_tokens} tokens")
    if num_tokens == arrays.num_tokens:
        return arrays
    rows = kept_rows(arrays, num_tokens)
    return replace(arrays, **{name: array[: rows[name]] for name, array in arrays.present().items()})


def kept_rows(arrays: BranchArrays, num_tokens: int) -> dict[str, int]:
    """Rows of each field that belong to the first `num_tokens` tokens."""
    rows = {field.name: num_tokens for field in fields(BranchArrays)}
    rows["head_ids"] = rows["head_logprobs"] = int(arrays.loss_mask[:num_tokens].sum(dtype=np.int64))
    if arrays.sampling_counts is not None:
        rows["sampling_ids"] = int(arrays.sampling_counts[:num_tokens].sum(dtype=np.int64))
    return rows
