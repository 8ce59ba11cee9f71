"""The ways of fetching that bench/payload.py compares; servers are processes of their own."""

from __future__ import annotations

import http.client
import itertools
import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from msgspec.structs import replace

from moorage.core.net import node_name
from moorage.core.rundir import write_json_atomic
from moorage.payload.client import PayloadClient
from moorage.payload.codec import BranchArrays, encode, nbytes_of
from moorage.payload.server import PayloadService
from moorage.payload.spool import SUFFIX, Spool
from moorage.records.payload import PayloadSlice

TOKEN = "bench" * 8
STORE = "train/bench.node"
REST_S = 0.3


def make_head_and_routing(tokens: int, seed: int = 0) -> BranchArrays:
    """A branch of the published shape: 256 prompt tokens, the rest sampled."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) >= min(256, tokens // 2)).astype(np.uint8)
    trained = int(mask.sum())
    return BranchArrays(
        token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=-rng.random(tokens, dtype=np.float32),
        routed_experts=rng.integers(0, 128, (tokens, 48, 8), dtype=np.uint8),
        head_ids=rng.integers(0, 150_000, (trained, 128), dtype=np.int32),
        head_logprobs=-rng.random((trained, 128), dtype=np.float32),
    )


class FixedBuffers:
    """The slices of the bench's one buffer, for a client to fetch into."""

    def __init__(self, targets: Sequence[np.ndarray]) -> None:
        self._targets = targets
        self._next = itertools.cycle(range(len(targets)))

    def take(self, nbytes: int) -> np.ndarray:
        return self._targets[next(self._next)][:nbytes]


class Round(NamedTuple):
    """One round of one way: its speed, and the processor time of both sides per GB."""

    gb_per_s: float
    client_s: float
    server_s: float


class FetchBench:
    """A spool of equal blobs, all servers over it, and one preallocated buffer that every way fills.

    What moorage reads is kept anew before each round, over the files of the round before, which the service
    was told to free; the others send the same files, or what they hold in memory, again and again.
    """

    def __init__(self, folder: Path, tokens: int, blobs: int, connections: int) -> None:
        self.connections = connections
        arrays = make_head_and_routing(tokens)
        self.blob = buffers = encode(arrays)
        self.nbytes = nbytes_of(buffers)
        self.spool = Spool(folder / "spool", "bench.1", 1 << 40)
        self.ids = [self.spool.keep(f"r{n}", buffers) for n in range(blobs)]
        self.paths = [self.spool.folder / f"r{n}" / f"{i}{SUFFIX}" for n, i in enumerate(self.ids)]
        self.buffer = np.zeros(blobs * self.nbytes, np.uint8)
        self.targets = [self.buffer[n * self.nbytes : (n + 1) * self.nbytes] for n in range(blobs)]
        self.threads = ThreadPoolExecutor(connections)
        self.service = PayloadService(folder / "spool", token=TOKEN)
        self.service.start()
        self._publish(folder)
        into = FixedBuffers(self.targets)
        self.remote = PayloadClient(TOKEN, connections=connections, buffers=into)
        self.local = PayloadClient(TOKEN, connections=connections, run_dir=folder, buffers=into)
        self.example = make_slice(arrays, self.service.url)
        self.slices = self._slices(self.ids)
        self.fresh: list[PayloadSlice] = []
        self.unlinking = Spool(folder / "unlinking", "bench.1", 1 << 40)
        self.servers = [
            start_server(serve, self.paths) for serve in (serve_raw, serve_stdlib_memory, serve_stdlib_files)
        ]
        self._local = threading.local()
        self.ways: dict[str, Callable[[], None]] = {
            "raw sendfile copy": self.fetch_raw,
            "moorage over HTTP": self.fetch_remote,
            "standard-library HTTP, from the files": lambda: self.fetch_stdlib(2),
            "standard-library HTTP, from its memory": lambda: self.fetch_stdlib(1),
            "moorage on one host, mapped and copied": self.fetch_mapped,
        }
        raw, memory, files = (process.pid for process, _ in self.servers)
        self.pids = dict(
            zip(self.ways, (raw, self.service.pid, files, memory, self.service.pid), strict=True)
        )
        self.prepare = dict.fromkeys(
            ("moorage over HTTP", "moorage on one host, mapped and copied"), self.keep_over
        )
        self.keeps = {"into new files": self.keep_new, "over recycled files": self.keep_over}

    def _slices(self, ids: Sequence[str]) -> list[PayloadSlice]:
        return [replace(self.example, id=blob_id) for blob_id in ids]

    def _publish(self, folder: Path) -> None:
        address = {"payload": self.service.url, "spool": str(self.spool.root), "node": node_name()}
        write_json_atomic(folder / "envs" / f"{STORE}.address", address)

    def time_fetch(self, name: str) -> Round:
        """One round of that way."""
        self.forget()
        self.prepare.get(name, lambda: None)()
        processes = psutil.Process(), psutil.Process(self.pids[name])
        before = [process.cpu_times() for process in processes]
        speed = self._time(self.ways[name])
        spent = [
            sum(process.cpu_times()[:2]) - sum(times[:2])
            for process, times in zip(processes, before, strict=True)
        ]
        return Round(speed, *(seconds * 1e9 / len(self.buffer) for seconds in spent))

    def time_keep(self, name: str) -> float:
        """GB/s of keeping one round's blobs that way."""
        self.forget()
        return self._time(self.keeps[name])

    def _time(self, way: Callable[[], None]) -> float:
        """After a rest: a process that has just worked waits longer on a busy machine."""
        time.sleep(REST_S)
        begun = time.perf_counter()
        way()
        return len(self.buffer) / (time.perf_counter() - begun) / 1e9

    def fetch_remote(self) -> None:
        self._expect_all(self.remote.fetch(self.fresh, 120))

    def fetch_mapped(self) -> None:
        self._expect_all(self.local.fetch(self.fresh, 120))
        assert self.local.counts.bytes_http == 0

    def keep_new(self) -> None:
        for _ in self.ids:
            self.unlinking.keep("r", self.blob)

    def keep_over(self) -> None:
        self.fresh = self._slices([self.spool.keep("fresh", self.blob) for _ in self.ids])

    def forget(self) -> None:
        """Free what was kept anew: through the service, as a trainer does, or by unlinking it."""
        freed, self.fresh = self.fresh, []
        assert self.local.release(freed, "trainer") == len(freed)
        while (self.spool.folder / "fresh").exists():
            time.sleep(0.001)
        for path in self.unlinking.folder.glob("r/*"):
            self.unlinking.free([path.stem], "trainer")

    def _expect_all(self, fetched) -> None:
        assert all(isinstance(arrays, BranchArrays) for arrays in fetched.values()), fetched

    def fetch_raw(self) -> None:
        list(self.threads.map(self._read_raw, range(len(self.ids))))

    def _read_raw(self, number: int) -> None:
        if not hasattr(self._local, "raw"):
            self._local.raw = socket.create_connection(("127.0.0.1", self.servers[0][1]))
        peer = self._local.raw
        peer.sendall(number.to_bytes(4, "little"))
        view, got = self.targets[number].data, 0
        while got < self.nbytes:
            got += peer.recv_into(view[got:], 0, socket.MSG_WAITALL)

    def fetch_stdlib(self, server: int) -> None:
        list(self.threads.map(self._read_stdlib, range(len(self.ids)), [server] * len(self.ids)))

    def _read_stdlib(self, number: int, server: int) -> None:
        peers = self._local.__dict__.setdefault("http", {})
        if server not in peers:
            peers[server] = http.client.HTTPConnection("127.0.0.1", self.servers[server][1])
        peers[server].request("GET", f"/{number}")
        answer = peers[server].getresponse()
        view, got = self.targets[number].data, 0
        while got < self.nbytes:
            got += answer.readinto(view[got:])

    def __enter__(self) -> FetchBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.remote.close()
        self.local.close()
        self.service.stop()
        self.threads.shutdown()
        for process, _ in self.servers:
            process.kill()
            process.join()
        self.spool.close()
        self.unlinking.close()


def make_slice(arrays: BranchArrays, url: str) -> PayloadSlice:
    tokens, fields = arrays.num_tokens, tuple(arrays.present())
    return PayloadSlice(url, STORE, "", tokens, tokens, fields, arrays.routing, nbytes_of(encode(arrays)))


def start_server(serve: Callable, paths: Sequence[Path]):
    """(process, port) of a server that says its port through a pipe."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(list(paths), send), daemon=True)
    process.start()
    return process, receive.recv()


def serve_raw(paths: list[Path], port_to) -> None:
    """Answers a 4-byte number with that file, by sendfile, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))
    port_to.send(listener.getsockname()[1])

    def talk(peer: socket.socket) -> None:
        while data := peer.recv(4, socket.MSG_WAITALL):
            fd = os.open(paths[int.from_bytes(data, "little")], os.O_RDONLY)
            at, size = 0, os.fstat(fd).st_size
            while at < size:
                at += os.sendfile(peer.fileno(), fd, at, size - at)
            os.close(fd)

    while True:
        threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()


def serve_stdlib_memory(paths: list[Path], port_to) -> None:
    """http.server's threads, sending blobs that it holds in memory: what no store with a budget can do."""
    blobs = [path.read_bytes() for path in paths]
    serve_stdlib(lambda number, out: out.write(blobs[number]), len(blobs[0]), port_to)


def serve_stdlib_files(paths: list[Path], port_to) -> None:
    """http.server's threads, sending the spool's files as its own file handler does."""

    def send(number: int, out) -> None:
        with paths[number].open("rb") as file:
            shutil.copyfileobj(file, out)

    serve_stdlib(send, paths[0].stat().st_size, port_to)


def serve_stdlib(send: Callable, nbytes: int, port_to) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(nbytes))
            self.end_headers()
            send(int(self.path[1:]), self.wfile)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port_to.send(server.server_address[1])
    server.serve_forever()
