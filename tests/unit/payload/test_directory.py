"""Where a store is: what the address file says now, the reference's own url without one, nothing if null."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.core.errors import PayloadError
from moorage.core.rundir import RunDir, write_json_atomic
from moorage.payload.client import PayloadClient
from moorage.payload.directory import StoreDirectory
from moorage.records.payload import PayloadSlice

STORE = "train/words.here"
PIECE = PayloadSlice("http://127.0.0.1:9", STORE, "0" * 32, 4, 4, ("token_ids",), None, 64)


def publish(root: Path, url: str | None) -> None:
    write_json_atomic(RunDir(root).address("train", "words.here"), {"payload": url, "spool": None})


def test_the_address_file_says_the_url_of_now(tmp_path: Path) -> None:
    assert StoreDirectory(tmp_path).url(PIECE) == PIECE.url
    publish(tmp_path, "http://127.0.0.1:10")
    assert StoreDirectory(tmp_path).url(PIECE) == "http://127.0.0.1:10"
    assert StoreDirectory(None).url(PIECE) == PIECE.url


def test_a_store_that_has_still_to_adopt_is_not_asked(tmp_path: Path) -> None:
    """It would answer 404, which is final, for a payload that it is about to take over."""
    publish(tmp_path, None)
    with pytest.raises(ConnectionError, match="not adopted"):
        StoreDirectory(tmp_path).url(PIECE)
    client = PayloadClient("t" * 32, run_dir=tmp_path)
    try:
        error = client.fetch([PIECE], deadline_s=0.5)[PIECE.id]
    finally:
        client.close()
    assert isinstance(error, PayloadError)
    assert not error.final
    assert client.counts.retries > 0
