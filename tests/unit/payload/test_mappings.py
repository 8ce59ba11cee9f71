"""Mapped files: what is handed over is the blob's, and no memory is held that nobody can name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM
from moorage.payload.mappings import Freed, Mappings

SIZE = RECYCLED_FROM + 4096


@pytest.fixture
def mappings() -> Iterator[Mappings]:
    mappings = Mappings(max_bytes=2 * SIZE)
    yield mappings
    mappings.close()


def write(path: Path, letter: bytes, size: int = SIZE) -> Path:
    path.write_bytes(letter * size)
    return path


def read(mappings: Mappings, path: Path, nbytes: int = SIZE) -> bytes:
    blob = mappings.open(path, nbytes)
    assert blob is not None
    return blob.read_into(np.zeros(nbytes, np.uint8)).tobytes()


def test_a_file_written_over_under_another_name_is_read_through_the_same_mapping(tmp_path, mappings) -> None:
    first = write(tmp_path / "a", b"a")
    assert read(mappings, first) == b"a" * SIZE
    os.rename(first, tmp_path / "b")
    with (tmp_path / "b").open("r+b") as file:
        file.write(b"b" * (SIZE - 10))
    assert read(mappings, tmp_path / "b", SIZE - 10) == b"b" * (SIZE - 10)
    assert mappings.mapped_bytes == SIZE


def test_a_file_that_has_grown_is_mapped_anew(tmp_path, mappings) -> None:
    path = write(tmp_path / "a", b"a")
    read(mappings, path)
    with path.open("ab") as file:
        file.write(b"z" * 100)
    assert read(mappings, path, SIZE + 100)[-100:] == b"z" * 100
    assert mappings.mapped_bytes == SIZE + 100


@pytest.mark.parametrize("change", ["renamed", "unlinked", "another"])
def test_what_was_freed_meanwhile_is_not_handed_over(tmp_path, mappings, change) -> None:
    path = write(tmp_path / "a", b"a")
    blob = mappings.open(path, SIZE)
    assert blob is not None
    if change == "another":
        os.replace(write(tmp_path / "b", b"b"), path)
    elif change == "renamed":
        os.rename(path, tmp_path / "b")
    else:
        path.unlink()
    with pytest.raises(Freed):
        blob.read_into(np.zeros(SIZE, np.uint8))
    with pytest.raises(Freed):
        blob.read_into(np.zeros(10, np.uint8), (5, 15))


def test_spans_are_copied_and_bounded(tmp_path, mappings) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(200)))
    blob = mappings.open(path, 200)
    assert blob is not None
    assert blob.read_into(np.zeros(3, np.uint8), (7, 10)).tolist() == [7, 8, 9]
    with pytest.raises(PayloadError, match="byte 201 of 200"):
        blob.read_into(np.zeros(3, np.uint8), (198, 201))
    assert mappings.mapped_bytes == 0, "small files are not written over, and not kept mapped"


@pytest.mark.parametrize(("size", "nbytes"), [(199, 200), (201, 200), (SIZE - 1, SIZE), (2 * SIZE, SIZE)])
def test_a_file_that_cannot_be_the_whole_blob_is_not_there(tmp_path, mappings, size, nbytes) -> None:
    assert mappings.open(write(tmp_path / "a", b"a", size), nbytes) is None
    assert mappings.open(tmp_path / "b", nbytes) is None


def test_files_without_a_name_are_let_go_and_the_rest_is_bounded(tmp_path, mappings) -> None:
    paths = [write(tmp_path / name, name.encode()) for name in "abc"]
    for path in paths:
        read(mappings, path)
    assert mappings.mapped_bytes == 2 * SIZE
    blob = mappings.open(paths[2], SIZE)
    assert blob is not None
    paths[1].unlink()
    mappings.sweep()
    assert mappings.mapped_bytes == SIZE
    mappings.close()
    assert mappings.mapped_bytes == 0
    assert blob.read_into(np.zeros(SIZE, np.uint8))[0] == ord("c"), "a copy under way is not disturbed"
