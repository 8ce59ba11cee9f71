"""Builders of branch arrays for the payload tests."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from moorage.payload.codec import BranchArrays, encode, nbytes_of
from moorage.payload.recycle import lies_in_memory
from moorage.payload.spool import TMPFS
from moorage.records.payload import PayloadSlice

OPTIONAL = ("content_mask", "routed_experts", "sampling", "head")


def make_arrays(
    num_tokens: int,
    *,
    seed: int = 0,
    optional: tuple[str, ...] = OPTIONAL,
    routing: tuple[int, int] = (3, 2),
    wide: bool = False,
    head_k: int = 4,
    prompt: int | None = None,
) -> BranchArrays:
    """A random branch with the named optional arrays. `prompt`: leading tokens that are not trained."""
    rng = np.random.default_rng(seed)
    if prompt is None:
        loss_mask = rng.integers(0, 2, num_tokens).astype(np.uint8)
        loss_mask[:1] = 0
    else:
        loss_mask = (np.arange(num_tokens) >= prompt).astype(np.uint8)
    num_trainable = int(loss_mask.sum())
    arrays: dict[str, np.ndarray] = {
        "token_ids": rng.integers(0, 1 << 17, num_tokens, dtype=np.int32),
        "loss_mask": loss_mask,
        "logprobs": np.where(loss_mask, -rng.random(num_tokens), 0).astype(np.float32),
    }
    if "content_mask" in optional:
        arrays["content_mask"] = rng.integers(0, 2, num_tokens).astype(np.uint8)
    if "routed_experts" in optional:
        dtype, top = (np.uint16, 4096) if wide else (np.uint8, 256)
        arrays["routed_experts"] = rng.integers(0, top, (num_tokens, *routing)).astype(dtype)
    if "sampling" in optional:
        counts = np.where(loss_mask, rng.integers(1, 6, num_tokens), 0).astype(np.int32)
        arrays["sampling_counts"] = counts
        arrays["sampling_ids"] = rng.integers(0, 1 << 17, int(counts.sum()), dtype=np.int32)
    if "head" in optional:
        arrays["head_ids"] = rng.integers(-1, 1000, (num_trainable, head_k), dtype=np.int32)
        arrays["head_logprobs"] = -rng.random((num_trainable, head_k)).astype(np.float32)
    return BranchArrays(**arrays)


def branches(max_tokens: int = 40) -> st.SearchStrategy[BranchArrays]:
    """Random branches, all combinations of optional arrays."""
    return st.builds(
        make_arrays,
        st.integers(0, max_tokens),
        seed=st.integers(0, 2**32 - 1),
        optional=st.sets(st.sampled_from(OPTIONAL)).map(tuple),
        wide=st.booleans(),
        head_k=st.integers(1, 5),
    )


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A new folder on tmpfs, where files of freed blobs are recycled; the test is skipped without."""
    if not TMPFS.is_dir() or not lies_in_memory(TMPFS):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(prefix="test-payload-", dir=TMPFS) as folder:
        yield Path(folder)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs of its own at `path`; the test is skipped where it may not be mounted."""
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True
    ).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", path], check=True) and None
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def join(buffers) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


def make_slice(
    arrays: BranchArrays, blob_id: str, url: str = "", store: str = "", num_tokens: int | None = None
) -> PayloadSlice:
    """The reference to a kept branch."""
    return PayloadSlice(
        url,
        store,
        blob_id,
        arrays.num_tokens if num_tokens is None else num_tokens,
        arrays.num_tokens,
        tuple(arrays.present()),
        arrays.routing,
        nbytes_of(encode(arrays)),
    )


def assert_same(left: BranchArrays, right: BranchArrays) -> None:
    """Same fields, dtypes, shapes and bytes."""
    assert list(left.present()) == list(right.present())
    for name, array in left.present().items():
        other = right.present()[name]
        assert array.dtype == other.dtype, name
        assert array.shape == other.shape, name
        assert array.tobytes() == other.tobytes(), name
