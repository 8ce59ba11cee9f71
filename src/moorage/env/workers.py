"""The broker's workers: starting, choosing, watching and ending them.

Owns the worker processes. Promises: a run goes to the least busy worker that has room for it; a worker's load
falls whatever the ending of its runs; a dead worker is noticed at once (its channel closes), reported with the
runs it had, and started again; the third death within a minute is reported as final.

It does not know clients, nor what a run is beyond its id and cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from moorage.core.log import get_logger
from moorage.env.channel import Channel, Kind
from moorage.env.protocol import encode
from moorage.env.worker import Assignment

DEATHS = 3
DEATHS_WINDOW_S = 60.0
STOP_S = 10.0
STUCK_S = 3.0
"""A worker that has not beaten for so long, and has a run past its deadline, is stuck."""
log = get_logger(__name__)


@dataclass(eq=False)
class WorkerProcess:
    """One worker as the broker sees it. `runs`: request id to what it costs."""

    index: int
    process: subprocess.Popen[bytes]
    channel: Channel | None = None
    ready: bool = False
    gone: bool = False
    runs: dict[str, int] = field(default_factory=dict)
    load: int = 0
    heard: float = 0.0
    last_words: str = ""

    def room(self, cost: int, capacity: int) -> bool:
        return self.ready and not self.gone and (self.load + cost <= capacity or not self.load)


@dataclass
class Callbacks:
    """What the broker wants to hear: a run ended, a worker became ready, a worker died, no more restarts."""

    on_ended: Callable[[str, int, int, bytes], None]
    on_ready: Callable[[], None]
    on_death: Callable[[list[str], str], None]
    on_final: Callable[[str], None]


class Workers:
    """All workers of one broker."""

    def __init__(self, count: int, capacity: int, assignment: Assignment, callbacks: Callbacks) -> None:
        self.count = count
        self.capacity = capacity
        self.assignment = assignment
        self.callbacks = callbacks
        self.deaths = 0
        self._recent: deque[float] = deque()
        self._workers: list[WorkerProcess] = []
        self._by_run: dict[str, WorkerProcess] = {}
        self._stopping = False
        self._first_ready: asyncio.Event = asyncio.Event()

    @property
    def num_ready(self) -> int:
        return sum(worker.ready and not worker.gone for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if not worker.gone]

    async def start(self) -> None:
        """Start all; return when they are started, not yet ready."""
        for index in range(self.count):
            await self._start_one(index)

    async def wait_ready(self, timeout_s: float) -> None:
        """Until one worker is ready. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._first_ready.wait()

    async def _start_one(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "moorage.env.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        worker = WorkerProcess(index, process, heard=time.monotonic())
        self._workers.append(worker)
        worker.channel = await Channel.open(
            ours,
            lambda kind, request_id, number, body: self._on_message(worker, kind, request_id, number, body),
            lambda: self._on_lost(worker),
        )
        worker.channel.send(Kind.CONFIG, body=encode(self._assignment(index)))

    def _assignment(self, index: int) -> Assignment:
        values = {name: getattr(self.assignment, name) for name in Assignment.__struct_fields__}
        return Assignment(**{**values, "index": index})

    # -- runs

    def choose(self, cost: int) -> WorkerProcess | None:
        """The least busy worker with room for `cost`, or None."""
        fitting = [worker for worker in self._workers if worker.room(cost, self.capacity)]
        return min(fitting, key=lambda worker: worker.load, default=None)

    def run(
        self, worker: WorkerProcess, kind: Kind, request_id: str, cost: int, left_s: float, body: bytes
    ) -> None:
        """Give a run to a worker."""
        worker.runs[request_id] = cost
        worker.load += cost
        self._by_run[request_id] = worker
        assert worker.channel is not None
        worker.channel.send(kind, request_id.encode(), left_s, body)

    def cancel(self, request_id: str) -> None:
        """Tell the worker of a run to end it."""
        worker = self._by_run.get(request_id)
        if worker is not None and worker.channel is not None:
            worker.channel.send(Kind.CANCEL, request_id.encode())

    def is_stuck(self, request_id: str) -> bool:
        """Whether the worker of this run has stopped beating."""
        worker = self._by_run.get(request_id)
        return worker is not None and time.monotonic() - worker.heard > STUCK_S

    def kill(self, request_id: str, reason: str) -> None:
        """End the worker of a run by force; its death is reported as any other."""
        worker = self._by_run.get(request_id)
        if worker is not None and not worker.gone:
            worker.last_words = reason
            log.warning("worker %d (pid %d) is killed: %s", worker.index, worker.process.pid, reason)
            _kill_tree(worker.process.pid)

    # -- what workers say

    def _on_message(
        self, worker: WorkerProcess, kind: int, request_id: bytes, number: float, body: bytes
    ) -> None:
        worker.heard = time.monotonic()
        if kind in (Kind.DONE, Kind.FAILED):
            run = request_id.decode()
            cost = worker.runs.pop(run, None)
            if cost is not None:
                worker.load -= cost
                self._by_run.pop(run, None)
                self.callbacks.on_ended(run, kind, int(number), body)
        elif kind == Kind.READY:
            worker.ready = True
            self._first_ready.set()
            log.info("worker %d (pid %d) is ready", worker.index, worker.process.pid)
            self.callbacks.on_ready()
        elif kind == Kind.FATAL:
            worker.last_words = body.decode(errors="replace").strip()

    def _on_lost(self, worker: WorkerProcess) -> None:
        if worker.gone:
            return
        worker.gone = True
        self._workers.remove(worker)
        runs = list(worker.runs)
        for run in runs:
            self._by_run.pop(run, None)
        asyncio.get_running_loop().run_in_executor(None, _reap, worker.process)
        if self._stopping:
            self.callbacks.on_death(runs, "the server is stopping")
            return
        self.deaths += 1
        reason = worker.last_words or f"exit code {_exit_code(worker.process)}"
        message = f"worker {worker.index} (pid {worker.process.pid}) died: {reason}"
        log.error("%s; it had %d runs", message, len(runs))
        self.callbacks.on_death(runs, message)
        if self._too_many():
            self.callbacks.on_final(message)
        else:
            task = asyncio.ensure_future(self._start_one(worker.index))
            task.add_done_callback(lambda t: t.exception())

    def _too_many(self) -> bool:
        now = time.monotonic()
        self._recent.append(now)
        while now - self._recent[0] > DEATHS_WINDOW_S:
            self._recent.popleft()
        return len(self._recent) >= DEATHS

    async def stop(self) -> None:
        """End all workers: STOP, then SIGTERM's stronger sister."""
        self._stopping = True
        workers = list(self._workers)
        for worker in workers:
            if worker.channel is not None:
                worker.channel.send(Kind.STOP)
        deadline = time.monotonic() + STOP_S
        while any(w.process.poll() is None for w in workers) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for worker in workers:
            if worker.process.poll() is None:
                _kill_tree(worker.process.pid)
            await asyncio.get_running_loop().run_in_executor(None, _reap, worker.process)
            if worker.channel is not None:
                worker.channel.close()


def _exit_code(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(0.5)
    except subprocess.TimeoutExpired:
        return "unknown"
    return f"{code} ({signal.Signals(-code).name})" if code < 0 else str(code)


def _kill_tree(pid: int) -> None:
    """Kill a worker and what it started (sandboxes that run as processes of this machine)."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        children = []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()


def _reap(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
