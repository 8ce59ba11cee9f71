"""Payloads under faults: dead, slow and lying services, killed writers, disks that fill or vanish (R5, R6).
Nothing is ever answered with zeros, nothing is lost from the account."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moorage.core.errors import PayloadError
from moorage.payload.client import PayloadClient
from moorage.payload.codec import encode
from moorage.payload.connections import Limits, PayloadListener, listen
from moorage.payload.http import make_head
from moorage.payload.server import PayloadService
from moorage.payload.spool import SUFFIX, Spool
from moorage.payload.store import Store
from moorage.records.payload import PayloadSlice
from tests.unit.payload.builders import assert_same, join, make_arrays, make_slice, small_disk

TOKEN = "70cce7" * 8


class ScriptedService:
    """A loopback server that answers each request with the next step of its script, then with the last."""

    def __init__(self, *script: bytes | str) -> None:
        self.script = list(script)
        self.requests: list[bytes] = []
        self._listener = listen("127.0.0.1", 0)
        self._peers: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        while True:
            try:
                data = peer.recv(65536)
            except OSError:
                return
            if not data:
                return
            self.requests.append(data)
            step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if step == "hang":
                continue
            assert isinstance(step, bytes)
            peer.sendall(step)
            if step.endswith(b"!"):  # an answer cut short
                peer.close()
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            peer.close()

    def __enter__(self) -> ScriptedService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(status: int, body: bytes = b"") -> bytes:
    return make_head(status, len(body)) + body


ARRAYS = make_arrays(30)
BLOB = join(encode(ARRAYS))


def slice_at(url: str, blob_id: str = "a" * 32) -> PayloadSlice:
    return make_slice(ARRAYS, blob_id, url)


def fetch_one(client: PayloadClient, piece: PayloadSlice, deadline_s: float = 20.0):
    return client.fetch([piece], deadline_s)[piece.id]


@pytest.mark.parametrize(
    "trouble",
    [
        answer(503, b"later"),
        answer(500, b"oops"),
        b"!",
        make_head(200, len(BLOB)) + BLOB[:100] + b"!",
        make_head(200, 7)[:20] + b"!",
    ],
)
def test_a_fetch_goes_on_after_trouble_that_passes(trouble) -> None:
    with ScriptedService(trouble, trouble, answer(200, BLOB)) as service, PayloadClient(TOKEN) as client:
        assert_same(fetch_one(client, slice_at(service.url)), ARRAYS)
        assert client.counts.retries == 2


@pytest.mark.parametrize(
    ("final", "named"),
    [
        (answer(404, b"no payload"), "404: no payload"),
        (answer(410, b"cut short on disk"), "cut short"),
        (answer(401, b"token"), "401"),
        (answer(200, BLOB[:-1]), "cut short"),
        (answer(200, b"\0" * len(BLOB)), "not a blob"),
        (answer(200, join(encode(make_arrays(29)))), "29 tokens, 30 are to be trained"),
        (answer(200, join(encode(make_arrays(30, routing=(5, 2))))), r"routing \(5, 2\)"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_final_at_once(final, named) -> None:
    with ScriptedService(final) as service, PayloadClient(TOKEN) as client:
        error = fetch_one(client, slice_at(service.url))
        assert isinstance(error, PayloadError)
        with pytest.raises(PayloadError, match=named):
            raise error
        assert len(service.requests) == 1
        assert client.counts.failed == 1


@pytest.mark.parametrize("script", ["hang", answer(503)])
def test_a_fetch_ends_by_its_deadline_and_says_what_happened_last(script) -> None:
    with ScriptedService(script) as service, PayloadClient(TOKEN, connections=4) as client:
        pieces = [slice_at(service.url, f"{n:032x}") for n in range(4)]
        begun = time.monotonic()
        fetched = client.fetch(pieces, 1.0)
        assert time.monotonic() - begun < 5
        assert all(isinstance(error, PayloadError) and not error.final for error in fetched.values())


def test_a_service_that_is_not_there_is_named() -> None:
    with PayloadClient(TOKEN) as client:
        error = fetch_one(client, slice_at("http://127.0.0.1:9"), 0.5)
        assert isinstance(error, PayloadError)
        assert "127.0.0.1:9" in str(error)
        bad = fetch_one(client, slice_at("ftp://somewhere"), 0.5)
        assert isinstance(bad, PayloadError)
        assert "expected http://host:port" in str(bad)


def test_closing_the_client_ends_a_fetch_that_hangs() -> None:
    with ScriptedService("hang") as service:
        client = PayloadClient(TOKEN)
        futures = client.start_fetch([slice_at(service.url)], 60)
        while not service.requests:
            time.sleep(0.01)
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < 5
        assert all(isinstance(future.result(1), PayloadError) for future in futures.values())


def test_deletes_are_repeated_carried_over_and_never_lost() -> None:
    """503 to the first, a hang on the next, then a store that knows nothing any more."""
    empty = answer(200, b'{"freed":0,"unknown":2}')
    pieces = [slice_at("", f"{n:032x}") for n in range(2)]
    with ScriptedService(answer(503), "hang", "hang", empty) as service, PayloadClient(TOKEN) as client:
        pieces = [slice_at(service.url, piece.id) for piece in pieces]
        assert client.release(pieces, "trainer", deadline_s=1.0) == 0
        assert {ref.id for ref, _ in client.pending_releases} == {piece.id for piece in pieces}
        assert {holder for _, holder in client.pending_releases} == {"trainer"}
        service.script = [empty]
        assert client.release([], "trainer", deadline_s=10.0) == 2
        assert client.pending_releases == []


def test_a_dead_store_does_not_keep_the_others_from_being_freed(tmp_path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 20)
    blob_id = spool.keep("r", encode(ARRAYS))
    with PayloadService(tmp_path, token=TOKEN) as service, PayloadClient(TOKEN) as client:
        dead, alive = slice_at("http://127.0.0.1:9", "d" * 32), slice_at(service.url, blob_id)
        assert client.release([dead, alive], "train_sink", deadline_s=1.0) == 1
        assert [ref.id for ref, _ in client.pending_releases] == [dead.id]
        assert client.ledger(service.url).outstanding == 0
    spool.close()


def test_a_service_killed_in_the_middle_is_started_again_and_nothing_is_counted_twice(tmp_path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 24)
    ids = [spool.keep("r", encode(ARRAYS)) for _ in range(40)]
    service = PayloadService(tmp_path, token=TOKEN)
    service.start()
    with PayloadClient(TOKEN, connections=2) as client:
        pieces = [slice_at(service.url, blob_id) for blob_id in ids]
        assert client.release(pieces[:10], "trainer") == 10
        futures = client.start_fetch(pieces[10:] * 5, 30)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        url = service.restart()
        assert url == pieces[0].url
        for future in futures.values():
            assert_same(future.result(30), ARRAYS)
        assert client.release(pieces[:20], "trainer") == 20
        ledger = client.ledger(url)
        assert (ledger.freed["trainer"], ledger.double_frees, ledger.unknown) == (20, 0, 0)
        assert client.release(pieces, "trainer") == 40
        assert client.ledger(url).outstanding == 0
    service.stop()
    spool.close()


def test_a_freed_blob_whose_file_a_kill_left_behind_is_gone_after_a_restart(tmp_path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 20, remember=10)
    blob_id = spool.keep("r", encode(ARRAYS))
    spool.free([blob_id], "trainer", unlink=False)
    assert list(tmp_path.glob(f"*/*/*{SUFFIX}"))
    with PayloadService(tmp_path, token=TOKEN), PayloadClient(TOKEN):
        assert not list(tmp_path.glob(f"*/*/*{SUFFIX}"))
    spool.close()


WRITER = """
import sys
from moorage.core.errors import PayloadError
from moorage.payload.spool import Spool
root, worker = sys.argv[1:]
spool = Spool(root, "run.1", 200_000, create=False)
print("ready", flush=True)
for number in range(10**6):
    request = f"w{worker}-{number}"
    try:
        ids = [spool.keep(request, [b"h" * 64, b"b" * 5000], timeout_s=5) for _ in range(3)]
        print(request, *ids, flush=True)
    except PayloadError:
        print(request, flush=True)
"""


def kill_writers_at_random(root: Path, rounds: int, seed: int) -> None:
    """Workers keep, the service frees, the broker discards; all of them are killed at random moments."""
    rng = random.Random(seed)
    broker = Spool(root, "run.1", 200_000, remember=10**6)
    service = PayloadService(root, token=TOKEN)
    service.start()
    replied: list[list[str]] = []
    lock = threading.Lock()

    def read(process: subprocess.Popen[str], requests: set[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            request, *ids = line.split()
            if request == "ready":
                continue
            with lock:
                requests.add(request)
                if ids and line.endswith("\n"):
                    replied.append([request, *ids])

    def spawn(worker: int) -> tuple[subprocess.Popen[str], threading.Thread, set[str]]:
        command = [sys.executable, "-c", WRITER, str(root), str(worker)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        requests: set[str] = set()
        reader = threading.Thread(target=read, args=(process, requests))
        reader.start()
        return process, reader, requests

    with PayloadClient(TOKEN, connections=2) as client:
        for number in range(rounds):
            workers = [spawn(2 * number + side) for side in range(2)]
            deadline = time.monotonic() + 20
            while len(replied) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            end = time.monotonic() + rng.uniform(0.05, 0.4)
            while time.monotonic() < end:
                with lock:
                    taken, replied[:] = replied[:], []
                pieces = [slice_at(service.url, blob_id) for _, *ids in taken[::2] for blob_id in ids]
                client.release(pieces, "trainer", deadline_s=5)
                for request, *_ in taken[1::2]:
                    broker.discard(request)
            if number % 2 and service.pid:
                os.kill(service.pid, signal.SIGKILL)
            for process, _, _ in workers:
                process.kill()
                process.wait()
            for process, reader, _ in workers:
                reader.join(10)
                assert process.stdout is not None
                process.stdout.close()
            if number % 2:
                service.restart()
            broker.catch_up()
            for request in list(broker._account.requests):  # the real broker knows what its workers ran
                broker.discard(request)
            replied.clear()
            client.release([], "trainer", deadline_s=5)
            ledger = client.ledger(service.url)
            assert ledger.kept == sum(ledger.freed.values())
            assert ledger.outstanding == ledger.double_frees == ledger.unknown == ledger.damaged == 0
            assert ledger.kept > 0
            assert ledger.peak_bytes <= 200_000
            assert broker.ledger() == ledger
            assert broker._account.held_bytes == 0
    service.stop()
    assert [path.name for path in (root / "run.1").iterdir()] == ["journal"]
    broker.close()


def test_the_account_is_right_whoever_is_killed_at_whatever_moment(tmp_path) -> None:
    kill_writers_at_random(tmp_path, rounds=2, seed=1)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_account_is_right_after_a_hundred_kills(tmp_path) -> None:
    kill_writers_at_random(tmp_path, rounds=50, seed=2)


def test_a_full_disk_fails_the_keep_by_name_and_frees_still_work(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "300k"):
        root = tmp_path / "disk"
        spool = Spool(root, "run.1", 1 << 30, remember=100)
        ids = [spool.keep(f"r{n}", [b"x" * 50_000]) for n in range(4)]
        with pytest.raises(PayloadError, match=f"cannot be written to {root}.*No space left"):
            spool.keep("r9", [b"x" * 200_000])
        ledger = spool.ledger()
        assert (ledger.kept, ledger.outstanding) == (4, 4)
        filler = (root / "filler").open("wb", buffering=0)
        with contextlib.suppress(OSError):
            while filler.write(b"f" * 4096):
                pass
        with contextlib.suppress(PayloadError):
            while spool._journal.append("X", "f" * 32):  # fill its last page: not one more line fits
                pass
        with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            assert client.release([slice_at(service.url, blob_id) for blob_id in ids[:2]], "trainer") == 2
            assert spool.discard("r2") == 1
            ledger = client.ledger(service.url)
            assert (ledger.freed["trainer"], ledger.freed["env_server"], ledger.outstanding) == (2, 1, 1)
        filler.close()
        spool.close()


def test_a_read_only_spool_serves_what_it_has_and_refuses_the_rest_by_name(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "1m") as remount:
        root = tmp_path / "disk"
        spool = Spool(root, "run.1", 1 << 20)
        blob_id = spool.keep("r", encode(ARRAYS))
        spool.close()
        remount("ro")
        with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            piece = slice_at(service.url, blob_id)
            assert_same(fetch_one(client, piece), ARRAYS)
            assert client.release([piece], "trainer", deadline_s=0.5) == 0
            assert len(client.pending_releases) == 1
            with pytest.raises(PayloadError, match=f"{root}/run.1/journal.*Read-only"):
                Spool(root, "run.1", 1 << 20)
            reader = Spool(root, "run.1", 1 << 20, create=False)
            with pytest.raises(PayloadError, match=f"{root}/run.1/journal"):
                reader.keep("r", encode(ARRAYS))
            reader.close()
            remount("rw")
            service.restart()
            assert client.release([], "trainer", deadline_s=10) == 1
            assert client.ledger(service.url).outstanding == 0


def test_a_file_where_the_spool_should_be_is_named(tmp_path) -> None:
    (tmp_path / "taken").write_text("not a folder")
    with pytest.raises(PayloadError, match=f"spool folder {tmp_path}/taken/run.1 cannot be made"):
        Spool(tmp_path / "taken", "run.1", 1 << 20)


def test_a_spool_deleted_under_the_server_is_named_and_counted(tmp_path) -> None:
    root = tmp_path / "spool"
    spool = Spool(root, "run.1", 1 << 20)
    blob_id = spool.keep("r", encode(ARRAYS))
    with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
        assert client.ledger(service.url).outstanding == 1
        shutil.rmtree(root)
        error = fetch_one(client, slice_at(service.url, blob_id))
        assert isinstance(error, PayloadError)
        assert str(root) in str(error)
        with pytest.raises(PayloadError, match=str(root)):
            spool.keep("r2", encode(ARRAYS))
        ledger = client.ledger(service.url)
        assert (ledger.damaged, ledger.outstanding) == (1, 1)
        assert client.release([slice_at(service.url, blob_id)], "trainer") == 1
        assert client.ledger(service.url).outstanding == 0
    spool.close()


@pytest.mark.parametrize("change", ["short", "long", "gone"])
def test_a_blob_damaged_on_disk_is_named_counted_and_never_served(tmp_path, change) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 20)
    blob_id = spool.keep("r", encode(ARRAYS))
    path = tmp_path / "run.1" / "r" / f"{blob_id}{SUFFIX}"
    if change == "gone":
        path.unlink()
    else:
        os.truncate(path, len(BLOB) + (10 if change == "long" else -10))
    with PayloadService(tmp_path, token=TOKEN) as service, PayloadClient(TOKEN) as client:
        error = fetch_one(client, slice_at(service.url, blob_id))
        assert isinstance(error, PayloadError)
        assert str(path) in str(error)
        assert "410" in str(error)
        assert client.ledger(service.url).damaged == 1
        assert client.release([slice_at(service.url, blob_id)], "trainer") == 1
    spool.close()


@contextmanager
def listening(root: Path, limits: Limits) -> Iterator[int]:
    """The service's own listener inside this process, with limits small enough to reach."""
    store, listener = Store(root), listen("127.0.0.1", 0)
    service = PayloadListener(store, listener, TOKEN, limits)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        service.close()
        thread.join(10)
        store.close()


def test_idle_slow_and_too_many_peers_are_turned_away(tmp_path) -> None:
    limits = Limits(max_connections=2, idle_timeout_s=0.4, head_timeout_s=0.4, send_timeout_s=0.4)
    Spool(tmp_path, "run.1", 1 << 20).close()
    with listening(tmp_path, limits) as port:

        def connect() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), timeout=5)

        with connect() as one, connect() as two:
            time.sleep(0.1)
            with connect() as three:
                assert three.recv(100).startswith(b"HTTP/1.1 503")
            assert one.recv(100) == b"", "an idle connection is closed"
            two.close()
        with connect() as slow:
            begun = time.monotonic()
            with pytest.raises(OSError, match=r"."):  # noqa: PT012 - which call notices is a matter of timing
                while time.monotonic() - begun < 5:
                    slow.sendall(b"G")
                    time.sleep(0.05)
                    slow.settimeout(0.001)
                    try:
                        if not slow.recv(100):
                            raise ConnectionError
                    except TimeoutError:
                        pass
                    slow.settimeout(5)
            assert time.monotonic() - begun < 4
        with PayloadClient(TOKEN) as client:
            assert client.ledger(f"http://127.0.0.1:{port}").kept == 0


def test_a_reader_that_takes_nothing_is_dropped(tmp_path) -> None:
    spool = Spool(tmp_path, "run.1", 1 << 28)
    blob_id = spool.keep("r", [b"x" * (64 << 20)])
    with listening(tmp_path, Limits(max_connections=1, send_timeout_s=0.3)) as port:
        lazy = socket.create_connection(("127.0.0.1", port), timeout=10)
        lazy.sendall(f"GET /{blob_id} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        time.sleep(0.8)
        with lazy, PayloadClient(TOKEN) as client:  # the one connection there is has become free
            assert client.ledger(f"http://127.0.0.1:{port}").outstanding == 1
    spool.close()


PARENT = """
import sys, time
from moorage.payload.server import PayloadService
service = PayloadService(sys.argv[1], token="t")
service.start()
print(service.pid, flush=True)
time.sleep(60)
"""


def test_the_service_ends_when_its_parent_is_killed(tmp_path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
