"""Blobs freed and files written over at full speed, under readers of every kind: each gets exactly the blob's
bytes or a clean error, never another blob's. Writers and service are processes of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from moorage.core.errors import PayloadError
from moorage.core.net import node_name
from moorage.core.rundir import write_json_atomic
from moorage.payload.client import PayloadClient
from moorage.payload.codec import BranchArrays, encode, nbytes_of
from moorage.payload.recycle import FOLDER_NAME
from moorage.payload.server import PayloadService
from moorage.payload.spool import SUFFIX, Spool
from moorage.records.payload import PayloadRef, PayloadSlice
from tests.unit.payload.builders import join, memory_folder, small_disk

TOKEN = "4ec7c1" * 8
STORE = "train/x.node"
BUDGET = 40 << 20
ROUTING = (20, 8)


def make_numbered(number: int) -> BranchArrays:
    """A branch every element of which says `number`; lengths vary over a few rooms."""
    tokens = 6300 + 97 * (number % 17)
    return BranchArrays(
        token_ids=np.full(tokens, number, np.int32),
        loss_mask=np.full(tokens, number % 2, np.uint8),
        logprobs=np.full(tokens, number, np.float32),
        routed_experts=np.full((tokens, *ROUTING), number % 251, np.uint8),
    )


def check_numbered(arrays: BranchArrays, number: int, num_tokens: int) -> None:
    expected = make_numbered(number)
    assert arrays.num_tokens == num_tokens
    for name, array in arrays.present().items():
        assert (array == getattr(expected, name)[:num_tokens]).all(), f"{name} of {number} has other bytes"


def slice_of(number: int, blob_id: str, url: str, num_tokens: int | None = None) -> PayloadSlice:
    arrays = make_numbered(number)
    tokens = arrays.num_tokens
    nbytes = nbytes_of(encode(arrays))
    return PayloadSlice(
        url, STORE, blob_id, num_tokens or tokens, tokens, tuple(arrays.present()), ROUTING, nbytes
    )


WRITER = """
import sys
from moorage.payload.codec import encode
from moorage.payload.spool import Spool
from tests.fault.test_payload_recycled import BUDGET, make_numbered
root, first = sys.argv[1], int(sys.argv[2])
spool = Spool(root, "run.1", BUDGET, create=False)
for number in range(first, first + 10**6):
    blob_id = spool.keep(f"q{number}", encode(make_numbered(number)), timeout_s=60)
    print(number, blob_id, flush=True)
"""


class Site:
    """Two writers, a service, and what was kept and not freed yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spool = Spool(root / "spool", "run.1", BUDGET, remember=10**6)
        self.service = PayloadService(root / "spool", token=TOKEN)
        self.service.start()
        address = {"payload": self.service.url, "spool": str(root / "spool"), "node": node_name()}
        write_json_atomic(root / "envs" / f"{STORE}.address", address)
        self.kept: queue.Queue[tuple[int, str]] = queue.Queue()
        self.recent: list[tuple[int, str]] = []
        self.dying: list[tuple[int, str]] = []
        self.files: set[int] = set()
        self.blobs = 0
        self.errors: list[BaseException] = []
        self.done = threading.Event()
        self.good = dict.fromkeys(("mapped", "http", "lazy"), 0)
        self.gone = dict(self.good)
        self._collectors: list[threading.Thread] = []
        self._writers = [self._spawn(side) for side in range(2)]

    def _spawn(self, side: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(self.spool.root), str(side * 10**6)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._collectors.append(threading.Thread(target=self._collect, args=(process,)))
        self._collectors[-1].start()
        return process

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):  # it was killed inside
                return
            number, blob_id = line.split()
            path = self.spool.folder / f"q{number}" / f"{blob_id}{SUFFIX}"
            self.files.add(path.stat().st_ino)
            self.blobs += 1
            self.recent = [*self.recent[-11:], (int(number), blob_id)]
            self.kept.put((int(number), blob_id))

    def run(self, seconds: float, meanwhile: Callable[[], object], *parties: Callable[[], object]) -> None:
        """Let all parties do what they do, again and again; the first failure is raised.

        `meanwhile` runs in this thread: the service ends with the thread that started it.
        """
        deadline = time.monotonic() + 60
        while self.blobs < 20 and time.monotonic() < deadline:  # the writers are starting
            time.sleep(0.05)
        threads = [threading.Thread(target=self._repeat, args=(party,)) for party in parties]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.done.is_set():
            meanwhile()
        self.done.set()
        for thread in threads:
            thread.join(30)
        if self.errors:
            raise self.errors[0]

    def _repeat(self, party: Callable[[], object]) -> None:
        try:
            while not self.done.is_set():
                party()
        except Exception as error:  # noqa: BLE001 - to be raised where the test waits
            self.errors.append(error)
            self.done.set()

    def pick(self, rng: random.Random) -> tuple[int, str] | None:
        """A blob that was just kept, or that is about to be freed."""
        candidates = rng.choice([self.recent, self.dying, self.dying]) or self.recent
        return rng.choice(candidates) if candidates else None

    def close(self) -> None:
        for process in self._writers:
            process.kill()
            process.wait()
        for collector in self._collectors:
            collector.join(10)
        for process in self._writers:
            assert process.stdout is not None
            process.stdout.close()
        self.service.stop()
        self.spool.close()


@contextmanager
def make_site() -> Iterator[Site]:
    with memory_folder() as root:
        site = Site(root)
        try:
            yield site
        finally:
            site.close()


def free_in_time(site: Site, client: PayloadClient, rng: random.Random) -> None:
    """The trainer's side: a few blobs at once, some at the instant they are there, some a moment later."""
    batch = []
    while len(batch) < rng.randint(1, 6):
        try:
            batch.append(site.kept.get(timeout=0.2))
        except queue.Empty:
            break
    site.dying = batch or site.dying
    time.sleep(rng.choice([0, 0, 0.002, 0.01, 0.03]))
    pieces = [slice_of(number, blob_id, site.service.url) for number, blob_id in batch]
    assert client.release(pieces, "trainer", deadline_s=20) >= len(pieces)


def fetch_any(site: Site, client: PayloadClient, rng: random.Random, way: str) -> None:
    """A reader that knows nothing of frees: the arrays, or a 404 that names the blob."""
    picked = site.pick(rng)
    if picked is None:
        return time.sleep(0.01)
    number, blob_id = picked
    piece = slice_of(number, blob_id, site.service.url, rng.choice([None, None, 100, 2500]))
    arrays = client.fetch([piece], 20)[blob_id]
    if isinstance(arrays, BranchArrays):
        check_numbered(arrays, number, piece.num_tokens)
        site.good[way] += 1
    else:
        assert blob_id in str(arrays)
        assert "404" in str(arrays)
        site.gone[way] += 1
    return None


def fetch_lazily(site: Site, rng: random.Random) -> None:
    """A peer that asks for a blob and reads it when others have freed it and written over what is free."""
    picked = site.pick(rng)
    if picked is None:
        return time.sleep(0.01)
    number, blob_id = picked
    try:
        with socket.create_connection(("127.0.0.1", site.service.port), timeout=20) as peer:
            peer.sendall(f"GET /{blob_id} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            time.sleep(rng.uniform(0, 0.1))
            data = b""
            while b"\r\n\r\n" not in data and (chunk := peer.recv(1024)):
                data += chunk
            head, _, body = data.partition(b"\r\n\r\n")
            blob = join(encode(make_numbered(number)))
            while head.startswith(b"HTTP/1.1 200") and len(body) < len(blob):
                if not (chunk := peer.recv(1 << 20)):
                    return None
                body += chunk
    except OSError:  # the service was killed under it
        return time.sleep(0.01)
    if head.startswith(b"HTTP/1.1 200"):
        assert body == blob, f"the bytes of {number} are another's"
        site.good["lazy"] += 1
    else:
        assert not head or head.startswith(b"HTTP/1.1 404")
        site.gone["lazy"] += 1
    return None


def stress(seconds: float, seed: int, *, kill_service: bool) -> None:
    with make_site() as site:
        rngs = [random.Random(seed * 100 + n) for n in range(6)]
        mapped = PayloadClient(TOKEN, connections=2, run_dir=site.root)
        remote, trainer = (PayloadClient(TOKEN, connections=2) for _ in range(2))

        def meanwhile() -> None:
            site.done.wait(rngs[5].uniform(0.3, 1.0))
            if kill_service and site.service.pid:
                os.kill(site.service.pid, signal.SIGKILL)
                site.service.restart()

        with mapped, remote, trainer:
            site.run(
                seconds,
                meanwhile,
                lambda: free_in_time(site, trainer, rngs[0]),
                lambda: fetch_any(site, mapped, rngs[1], "mapped"),
                lambda: fetch_any(site, mapped, rngs[2], "mapped"),
                lambda: fetch_any(site, remote, rngs[3], "http"),
                lambda: fetch_lazily(site, rngs[4]),
            )
            assert mapped.counts.bytes_mapped > 0
            ledger = trainer.ledger(site.service.url)
        assert (ledger.double_frees, ledger.unknown, ledger.damaged) == (0, 0, 0)
        assert ledger.freed["trainer"] + ledger.outstanding == ledger.kept
        assert ledger.peak_bytes <= BUDGET
        assert site.good["mapped"] > 0
        assert kill_service or min(site.good.values()) > 0, site.good
        assert kill_service or site.gone["mapped"] > 0, "no free ever overtook a reader"
        assert len(site.files) < site.blobs, "no file ever served again"


def test_no_reader_ever_has_another_blobs_bytes() -> None:
    stress(5, seed=1, kill_service=False)


def test_no_reader_ever_has_another_blobs_bytes_when_the_service_is_killed() -> None:
    stress(5, seed=2, kill_service=True)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill_service", [False, True])
def test_no_reader_ever_has_another_blobs_bytes_for_minutes(kill_service) -> None:
    stress(240, seed=3, kill_service=kill_service)


def test_bytes_sent_before_a_kill_are_the_blobs_whoever_writes_since() -> None:
    """They wait in the reader's queue, and the service that sent them is dead: the queue must hold copies."""
    with memory_folder() as root:
        spool = Spool(root, "run.1", BUDGET, remember=100)
        blob_id = spool.keep("r", encode(make_numbered(1)))
        with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            peer = socket.create_connection(("127.0.0.1", service.port), timeout=20)
            peer.sendall(f"GET /{blob_id} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            head = peer.recv(1 << 12, socket.MSG_PEEK)
            sent_file = (spool.folder / "r" / f"{blob_id}{SUFFIX}").stat().st_ino
            time.sleep(0.2)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            service.restart()
            assert client.release([slice_of(1, blob_id, service.url)], "trainer") == 1
            time.sleep(0.2)
            files = set()
            for number in range(2, 8):
                other = spool.keep("r", encode(make_numbered(number)))
                files.add((spool.folder / "r" / f"{other}{SUFFIX}").stat().st_ino)
            assert sent_file in files
            body = read_rest(peer).partition(b"\r\n\r\n")[2]
            assert head.startswith(b"HTTP/1.1 200")
            assert len(body) > 1 << 16
            assert join(encode(make_numbered(1))).startswith(body)
        spool.close()


def read_rest(peer: socket.socket) -> bytes:
    """What lies in the queue of a connection whose other end is dead."""
    data = b""
    with peer, contextlib.suppress(OSError):
        while chunk := peer.recv(1 << 20):
            data += chunk
    return data


def test_files_that_wait_make_room_on_a_full_disk(tmp_path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "4m"):
        spool = Spool(disk, "run.1", 1 << 30, remember=100)
        with PayloadService(disk, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            ids = [spool.keep("r", encode(make_numbered(number))) for number in range(2)]
            pieces = [slice_of(number, blob_id, service.url) for number, blob_id in enumerate(ids)]
            assert client.release(pieces, "trainer") == 2
            wait_until_gone(spool.folder / "r")
            assert len(list((spool.folder / FOLDER_NAME).iterdir())) == 2
            spool.keep("r", [b"x" * (3 << 20)])
            assert client.ledger(service.url).outstanding == 1
        spool.close()


def test_an_answer_that_a_free_overtakes_ends_short() -> None:
    """The reader has taken a little when its blob is freed and written over: it gets no whole answer."""
    size = 16 << 20
    with memory_folder() as root:
        spool = Spool(root, "run.1", 2 * size, remember=100)
        with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            blob_id = spool.keep("r", [b"a" * size])
            with socket.socket() as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                peer.connect(("127.0.0.1", service.port))
                peer.settimeout(20)
                peer.sendall(f"GET /{blob_id} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
                data = peer.recv(1000)
                number = (spool.folder / "r" / f"{blob_id}{SUFFIX}").stat().st_ino
                assert client.release([PayloadRef(service.url, STORE, blob_id)], "trainer") == 1
                wait_until_gone(spool.folder / "r")
                other = spool.keep("r", [b"b" * size])
                assert (spool.folder / "r" / f"{other}{SUFFIX}").stat().st_ino == number
                while chunk := peer.recv(1 << 20):
                    data += chunk
            head, _, body = data.partition(b"\r\n\r\n")
            assert f"Content-Length: {size}".encode() in head
            assert b"b" in body, "the file was not written over while it was sent: the test shows nothing"
            assert len(body) < size
        spool.close()


def test_the_service_lets_go_of_files_that_others_unlink() -> None:
    with memory_folder() as root:
        spool = Spool(root, "run.1", BUDGET)
        with PayloadService(root, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            blob_id = spool.keep("r", encode(make_numbered(1)))
            assert isinstance(client.fetch([slice_of(1, blob_id, service.url)], 20)[blob_id], BranchArrays)
            assert service.pid is not None
            assert maps_of(root, service.pid) == 1
            assert spool.discard("r") == 1
            deadline = time.monotonic() + 10
            while maps_of(root, service.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert maps_of(root, service.pid) == 0
        spool.close()


def test_a_large_blob_on_a_read_only_disk_is_served(tmp_path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "8m") as remount:
        spool = Spool(disk, "run.1", 1 << 30)
        blob_id = spool.keep("r", encode(make_numbered(1)))
        spool.close()
        remount("ro")
        with PayloadService(disk, token=TOKEN) as service, PayloadClient(TOKEN) as client:
            piece = slice_of(1, blob_id, service.url)
            arrays = client.fetch([piece], 20)[blob_id]
            assert isinstance(arrays, BranchArrays), arrays
            check_numbered(arrays, 1, piece.num_tokens)


@contextmanager
def one_host(root: Path) -> Iterator[tuple[Spool, PayloadService, PayloadClient]]:
    """A spool, its service, and a client that knows that they are here."""
    spool = Spool(root / "spool", "run.1", BUDGET, remember=100)
    with PayloadService(root / "spool", token=TOKEN) as service:
        address = {"payload": service.url, "spool": str(root / "spool"), "node": node_name()}
        write_json_atomic(root / "envs" / f"{STORE}.address", address)
        with PayloadClient(TOKEN, run_dir=root) as client:
            yield spool, service, client
    spool.close()


def test_a_reader_that_the_free_overtakes_has_a_404_that_names_the_blob() -> None:
    with memory_folder() as root, one_host(root) as (spool, service, _):
        blob_id = spool.keep("r", encode(make_numbered(1)))

        class FreeingBuffers:
            """The blob is freed after it was looked up and before it is copied."""

            def take(self, nbytes: int) -> np.ndarray:
                spool.free([blob_id], "trainer")
                return np.empty(nbytes, np.uint8)

        with PayloadClient(TOKEN, run_dir=root, buffers=FreeingBuffers()) as client:
            error = client.fetch([slice_of(1, blob_id, service.url)], 10)[blob_id]
            assert isinstance(error, PayloadError)
            assert "404" in str(error)
            assert blob_id in str(error)
            assert client.counts.bytes_mapped == 0


def test_what_was_fetched_stays_what_it_was_when_its_file_is_written_over() -> None:
    with memory_folder() as root, one_host(root) as (spool, service, client):
        files, fetched = set(), []
        for number in range(4):
            blob_id = spool.keep(f"r{number}", encode(make_numbered(number)))
            files.add((spool.folder / f"r{number}" / f"{blob_id}{SUFFIX}").stat().st_ino)
            piece = slice_of(number, blob_id, service.url)
            fetched.append(client.fetch([piece], 10)[blob_id])
            assert client.release([piece], "trainer") == 1
            wait_until_gone(spool.folder / f"r{number}")
        assert len(files) == 1
        assert client.counts.bytes_http == 0
        for number, arrays in enumerate(fetched):
            assert isinstance(arrays, BranchArrays), arrays
            check_numbered(arrays, number, make_numbered(number).num_tokens)


def test_of_a_cut_payload_only_the_kept_prefix_is_read() -> None:
    with memory_folder() as root, one_host(root) as (spool, service, client):
        blob_id, before = spool.keep("r", encode(make_numbered(7))), 0
        for num_tokens in (1, 100, 3000, 5000):
            piece = slice_of(7, blob_id, service.url, num_tokens)
            arrays = client.fetch([piece], 10)[blob_id]
            assert isinstance(arrays, BranchArrays), arrays
            check_numbered(arrays, 7, num_tokens)
            kept = sum(array.nbytes for array in arrays.present().values())
            read = client.counts.bytes_mapped - before
            before += read
            assert read == (kept if num_tokens <= 3000 else piece.nbytes)
        assert client.counts.bytes_http == 0


def test_a_reader_holds_no_memory_of_files_that_are_gone() -> None:
    with memory_folder() as root, one_host(root) as (spool, service, client):
        blob_id = spool.keep("r", encode(make_numbered(1)))
        client.fetch([slice_of(1, blob_id, service.url)], 10)
        assert maps_of(root) == 1
        assert spool.discard("r") == 1
        client.release([], "trainer")
        assert maps_of(root) == 0


def maps_of(root: Path, pid: int | str = "self") -> int:
    """Blob files under `root` that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(str(root) in line and SUFFIX in line for line in lines)


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not path.exists()
