"""Weight versions: whole or not there, also while a writer is killed or a reader looks on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moorage.core.errors import ExchangeError
from moorage.core.rundir import RunDir
from moorage.exchange.weights import newest_version, publish_weights, remove_version


def _write(content: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def test_a_version_is_published_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert publish_weights(run, 3, _write(b"three"))
    assert not publish_weights(run, 3, _write(b"other"))
    assert (run.weight(3) / "model.safetensors").read_bytes() == b"three"
    assert newest_version(run) == 3


def test_a_writer_that_fails_leaves_no_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(ExchangeError, match=r"version 1 cannot be written.*disk full"):
        publish_weights(run, 1, fail)
    assert newest_version(run) is None
    assert not run.weight(1).exists()
    assert publish_weights(run, 1, _write(b"whole"))
    assert newest_version(run) == 1


def test_what_an_attempt_left_before_ready_is_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.weight(2).mkdir(parents=True)
    (run.weight(2) / "torn.safetensors").write_bytes(b"torn")
    assert publish_weights(run, 2, _write(b"new"))
    assert sorted(path.name for path in run.weight(2).iterdir()) == ["READY", "model.safetensors"]


def test_a_reader_never_sees_a_torn_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    stop = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not stop.is_set():
            version = newest_version(run)
            if version is None:
                continue
            try:
                content = (run.weight(version) / "model.safetensors").read_bytes()
            except FileNotFoundError:
                if (run.weight(version) / "READY").exists():
                    torn.append(f"version {version} is READY without its file")
                continue
            if content != bytes([version]) * 100_000:
                torn.append(f"version {version} is torn")

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(60):
        publish_weights(run, version, _write(bytes([version]) * 100_000))
        if version > 1:
            assert remove_version(run, version - 2)
    stop.set()
    reader.join()
    assert torn == []


def test_ranks_write_their_shares_side_by_side(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    barrier = threading.Barrier(3)

    def rank(number: int) -> None:
        publish_weights(
            run,
            7,
            lambda folder: (folder / f"model-{number}.safetensors").write_bytes(b"x"),
            is_main=number == 0,
            meet=barrier.wait,
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(path.name for path in run.weight(7).iterdir())
    assert names == ["READY", *[f"model-{n}.safetensors" for n in range(3)]]
