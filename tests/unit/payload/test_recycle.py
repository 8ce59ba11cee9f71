"""Files of freed blobs serve again: only when nobody can be misled by it, and inside the budget."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.core.errors import PayloadError
from moorage.payload.account import RECYCLED_FROM, footprint
from moorage.payload.codec import decode, encode, nbytes_of
from moorage.payload.mappings import Freed
from moorage.payload.recycle import FOLDER_NAME, Recycled, holds
from moorage.payload.spool import SUFFIX, Spool
from moorage.payload.store import Store
from tests.unit.payload.builders import assert_same, make_arrays, memory_folder

ROOM = footprint(RECYCLED_FROM + 1)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def spool(root: Path) -> Iterator[Spool]:
    spool = Spool(root, "run.1", 4 * ROOM, remember=100)
    yield spool
    spool.close()


@pytest.fixture
def store(spool: Spool) -> Iterator[Store]:
    store = Store(spool.root)
    yield store
    store.close()


def make_blob(letter: bytes, less: int = 0) -> bytes:
    """A large blob; up to 100,000 bytes `less` of it need the same room."""
    return letter * (ROOM - less)


def waiting(spool: Spool) -> list[int]:
    return [size for size, _ in Recycled(spool.folder).files()]


def path_of(spool: Spool, blob_id: str, request: str = "r") -> Path:
    return spool.folder / request / f"{blob_id}{SUFFIX}"


def mapped_bytes(spool: Spool) -> int:
    """Bytes of the spool's files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0] for line in lines if str(spool.folder) in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (each.split("-") for each in ranges))


def free(store: Store, *blob_ids: str) -> None:
    assert store.free(blob_ids, "trainer").freed == len(blob_ids)
    store.settle()


@given(st.integers(0, 1 << 40))
def test_rooms_waste_less_than_an_eighth_and_fit_themselves(nbytes: int) -> None:
    room = footprint(nbytes)
    assert nbytes <= room <= nbytes * 9 // 8
    assert footprint(room) == room
    assert holds(nbytes, nbytes)
    assert holds(room, nbytes)
    assert not holds(room + 1, nbytes)
    assert not holds(nbytes - 1, nbytes)


def test_a_freed_file_serves_the_next_blob_of_its_room(spool: Spool, store: Store) -> None:
    first = spool.keep("r", [make_blob(b"a")])
    number = path_of(spool, first).stat().st_ino
    free(store, first)
    assert waiting(spool) == [ROOM]
    assert not (spool.folder / "r").exists()
    other = spool.keep("r2", [b"o" * (2 * ROOM)])
    assert waiting(spool) == [ROOM], "another room"
    second = spool.keep("r2", [make_blob(b"b", less=1000)])
    found = path_of(spool, second, "r2").stat()
    assert (found.st_ino, found.st_size) == (number, ROOM)
    blob = store.open(second)
    assert blob is not None
    assert os.pread(blob.fd, blob.nbytes, 0) == make_blob(b"b", less=1000)
    os.close(blob.fd)
    assert waiting(spool) == []
    free(store, other, second)


def test_small_blobs_and_those_that_the_env_server_frees_are_unlinked(spool: Spool, store: Store) -> None:
    small, large = spool.keep("r", [b"s" * 1000]), spool.keep("r", [make_blob(b"a")])
    free(store, small)
    spool.free([large], "env_server")
    spool.keep("r2", [make_blob(b"b")])
    spool.discard("r2")
    assert waiting(spool) == []


def test_held_and_waiting_files_stay_in_the_budget(spool: Spool, store: Store) -> None:
    ids = [spool.keep("r", [make_blob(b"a")]) for _ in range(3)]
    free(store, *ids)
    assert waiting(spool) == [ROOM] * 3
    large = spool.keep("r", [b"b" * (2 * ROOM)])
    assert waiting(spool) == [ROOM] * 2
    spool.keep("r", [b"c" * 1000])
    assert waiting(spool) == [ROOM]
    free(store, large)
    assert sum(waiting(spool)) <= 3 * ROOM, "never more than was held at once"
    assert spool.ledger().outstanding == 1


def test_what_was_held_at_most_is_not_passed_by_what_waits(spool: Spool, store: Store) -> None:
    for _ in range(3):
        blob_id = spool.keep("r", [make_blob(b"a")])
        other = spool.keep("r", [b"b" * (footprint(ROOM + 1))])
        free(store, blob_id, other)
        assert sum(waiting(spool)) <= spool.ledger().peak_bytes == ROOM + footprint(ROOM + 1)


def test_bytes_that_lie_in_a_socket_stay_what_they_were_when_the_file_is_written_over(
    spool: Spool, store: Store
) -> None:
    blob_id = spool.keep("r", [make_blob(b"a")])
    number = path_of(spool, blob_id).stat().st_ino
    blob = store.open(blob_id)
    assert blob is not None
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        sent = near.send(next(blob.pieces(0, ROOM)))
        os.close(blob.fd)
        free(store, blob_id)
        second = spool.keep("r", [make_blob(b"b")])
        assert path_of(spool, second).stat().st_ino == number
        assert far.recv(sent, socket.MSG_WAITALL) == b"a" * sent


@pytest.mark.parametrize("after", ["free", "written over"])
@pytest.mark.parametrize("span", [(0, ROOM), (0, 100), (ROOM - 10, ROOM), (1000, ROOM - 1000)])
def test_the_end_of_a_blob_that_was_freed_is_never_handed_out(spool, store, span, after) -> None:
    blob_id = spool.keep("r", [make_blob(b"a")])
    blob = store.open(blob_id)
    assert blob is not None
    pieces = blob.pieces(*span)
    got = [next(pieces)] if span[1] - span[0] > 1 << 16 else []
    free(store, blob_id)
    if after == "written over":
        spool.keep("r", [make_blob(b"b")])
    with pytest.raises(Freed):
        got.extend(pieces)
    assert sum(map(len, got)) < span[1] - span[0]
    os.close(blob.fd)


@given(st.integers(0, ROOM), st.integers(0, ROOM))
def test_pieces_are_the_bytes_of_the_span(one, other) -> None:
    start, stop = sorted((one, other))
    with memory_folder() as root:
        spool = Spool(root, "run.1", 4 * ROOM)
        data = os.urandom(1 << 12) * (ROOM // (1 << 12))
        store = Store(root)
        blob = store.open(spool.keep("r", [data]))
        assert blob is not None
        assert b"".join(map(bytes, blob.pieces(start, stop))) == data[start:stop]
        os.close(blob.fd)
        store.close()
        spool.close()


def test_sent_blobs_are_recycled_and_what_is_unlinked_is_not_held(spool: Spool, store: Store) -> None:
    blob_id = spool.keep("r", [make_blob(b"a")])
    blob = store.open(blob_id)
    assert blob is not None
    assert sum(map(len, blob.pieces(0, blob.nbytes))) == ROOM
    os.close(blob.fd)
    del blob
    free(store, blob_id)
    assert waiting(spool) == [ROOM]
    assert mapped_bytes(spool) == ROOM
    spool.discard_all("env_server")  # in another process of the env server
    deadline = time.monotonic() + 10
    while mapped_bytes(spool) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mapped_bytes(spool) == 0


def test_a_service_without_room_for_one_more_file_says_so_and_counts_no_damage(
    spool: Spool, store: Store
) -> None:
    blob_id = spool.keep("r", [make_blob(b"a")])
    fds, before = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        for free_descriptors in (0, 1, 2):
            with contextlib.suppress(OSError):
                while True:
                    fds.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(free_descriptors):
                os.close(fds.pop())
            with pytest.raises(PayloadError, match="cannot be opened just now"):
                store.open(blob_id)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fds:
            os.close(fd)
    blob = store.open(blob_id)
    assert blob is not None
    os.close(blob.fd)
    assert store.ledger().damaged == 0


def test_a_taken_file_that_cannot_be_written_is_replaced(spool: Spool) -> None:
    path = path_of(spool, "f" * 32)
    path.parent.mkdir()
    spool._write(path, [make_blob(b"a")], over=True)
    assert path.read_bytes() == make_blob(b"a")


def test_an_adopted_blob_has_its_own_size_not_its_files(spool: Spool, store: Store) -> None:
    large, small = (
        make_arrays(tokens, seed=tokens, optional=("routed_experts",), routing=(20, 8))
        for tokens in (6890, 6600)
    )
    assert footprint(nbytes_of(encode(large))) == footprint(nbytes_of(encode(small)))
    free(store, spool.keep("r", encode(large)))
    blob_id = spool.keep("r", encode(small))
    assert path_of(spool, blob_id).stat().st_size > nbytes_of(encode(small))
    no_blob = spool.keep("r", [make_blob(b"x")])
    new = Spool(spool.root, "run.2", 1 << 30, remember=10)
    assert new.adopt([blob_id, no_blob]) == (blob_id,)
    entry = new.find(blob_id)
    assert entry is not None
    assert entry.nbytes == nbytes_of(encode(small))
    assert_same(decode(new.path_of(entry).read_bytes()[: entry.nbytes]), small)
    new.close()


def test_a_writer_killed_after_it_took_a_file_leaves_its_request_to_be_discarded(
    spool: Spool, store: Store
) -> None:
    free(store, spool.keep("r", [make_blob(b"a")]))
    spool._journal.append("R", "1.0", "f" * 32, "r2", str(ROOM))
    assert Recycled(spool.folder).take(ROOM, spool.folder / "r2" / ("f" * 32 + ".tmp"), 0)
    assert spool.sweep() == 0
    assert store.open("f" * 32) is None
    assert spool.discard("r2") == 0
    assert not (spool.folder / "r2").exists()
    assert spool._account.held_bytes == 0


def test_a_service_killed_before_it_moved_a_file_unlinks_it_when_it_is_back(spool: Spool) -> None:
    blob_id, kept = (spool.keep("r", [make_blob(b"a")]) for _ in range(2))
    waited = spool.keep("r", [make_blob(b"w")])
    before = Store(spool.root)
    free(before, waited)
    spool.free([blob_id], "trainer", unlink=False)  # and there it was killed
    after = Store(spool.root)
    assert not path_of(spool, blob_id).exists()
    assert path_of(spool, kept).exists()
    assert waiting(spool) == [ROOM], "what waits is not taken for a freed file that was missed"
    after.close()
    assert waiting(spool) == []
    before.close()


def test_nothing_waits_after_everything_was_freed(spool: Spool, store: Store) -> None:
    free(store, spool.keep("r", [make_blob(b"a")]))
    assert spool.discard_all("shutdown") == 0
    assert sorted(path.name for path in spool.folder.iterdir()) == ["journal"]


def test_a_blob_freed_while_an_attempt_ends_is_not_kept_back(spool: Spool) -> None:
    blob_id = spool.keep("r", [make_blob(b"a")])
    entry = spool.find(blob_id)
    assert entry is not None
    spool._record("E", "1.0")
    spool.recycle_file(entry)
    assert not (spool.folder / FOLDER_NAME).exists()
    assert not path_of(spool, blob_id).exists()


def test_on_a_disk_files_are_unlinked(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 30)
    spool._recycled._in_memory = False
    entry = spool.find(spool.keep("r", [make_blob(b"a")]))
    assert entry is not None
    spool.free([entry.id], "trainer", unlink=False)
    spool.recycle_file(entry)
    assert sorted(path.name for path in spool.folder.iterdir()) == ["journal"]
    spool.close()
