"""The broker's workers: starting, choosing, watching and ending them.

Owns the worker processes. Promises: a run goes to the least busy worker that has room for it; a worker's
load falls whatever the ending of its runs; a dead worker is noticed at once (its channel closes), reported
with the runs it had, and started again, and what it left running is ended; the third death within a minute
is reported as final. It does not know clients, nor what a run is beyond its id and cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import psutil

from moorage.core.aio import TaskOwner
from moorage.core.log import get_logger
from moorage.env.channel import Channel, Kind
from moorage.env.nursery import Nursery
from moorage.env.protocol import encode
from moorage.env.worker import Assignment

DEATHS = 3
DEATHS_WINDOW_S = 60.0
STOP_S = 10.0
STUCK_S = 3.0
"""A worker that has not beaten for so long, and has a run past its deadline, is stuck."""
_BURY_S = 0.2
"""So long the nursery has to say how a worker ended, before its runs are answered."""
_PR_SET_CHILD_SUBREAPER = 36
log = get_logger(__name__)


@dataclass(eq=False)
class WorkerProcess:
    """One worker as the broker sees it. `runs`: request id to what it costs; `pid` None until it is born."""

    index: int
    serial: int = 0
    channel: Channel | None = None
    pid: int | None = None
    ready: bool = False
    lost: bool = False
    killed: bool = False
    exit_code: int | None = None
    runs: dict[str, int] = field(default_factory=dict)
    load: int = 0
    heard: float = 0.0
    last_words: str = ""

    def room(self, cost: int, capacity: int) -> bool:
        """Whether it can take `cost` more. A group larger than a worker's capacity gets a whole worker."""
        return self.ready and not self.lost and (self.load + cost <= capacity or not self.load)

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.pid})"


@dataclass
class Callbacks:
    """What the broker wants to hear: a run ended, a worker became ready, a worker died, no more restarts.

    `spared` names the children of this process that are not workers' (the payload service).
    """

    on_ended: Callable[[str, int, int, bytes], None]
    on_ready: Callable[[], None]
    on_death: Callable[[list[str], str], None]
    on_final: Callable[[str], None]
    spared: Callable[[], int]


class Workers:
    """All workers of one broker."""

    def __init__(
        self, count: int, capacity: int, assignment: Assignment, callbacks: Callbacks, nursery: Nursery
    ) -> None:
        self.count = count
        self.capacity = capacity
        self.assignment = assignment
        self.callbacks = callbacks
        self.deaths = 0
        self._recent: deque[float] = deque()
        self._workers: list[WorkerProcess] = []
        self._by_run: dict[str, WorkerProcess] = {}
        self._stopping = False
        self._someone_ready = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._owner = TaskOwner("workers")
        self._nursery = nursery
        nursery.on_born, nursery.on_exit = self._on_born, self._on_exit

    @property
    def num_ready(self) -> int:
        return sum(worker.ready and not worker.lost for worker in self._workers)

    async def start(self) -> None:
        """Ask for all; return before they are ready."""
        adopt_orphans()
        for index in range(self.count):
            await self._start_one(index)

    async def wait_ready(self, timeout_s: float) -> None:
        """Until one worker is ready. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._someone_ready.wait()

    async def _start_one(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        worker = WorkerProcess(index, heard=time.monotonic())
        self._workers.append(worker)
        worker.serial = self._nursery.fork(theirs)
        worker.channel = await Channel.open(
            ours,
            lambda kind, request_id, number, body: self._on_message(worker, kind, request_id, number, body),
            lambda: self._on_lost(worker),
        )
        worker.channel.send(Kind.CONFIG, body=encode(msgspec.structs.replace(self.assignment, index=index)))

    # -- runs

    def choose(self, cost: int) -> WorkerProcess | None:
        """The least busy worker with room for `cost`, or None."""
        fitting = [worker for worker in self._workers if worker.room(cost, self.capacity)]
        return min(fitting, key=lambda worker: worker.load, default=None)

    def give(
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
        if worker is not None and not worker.lost and worker.pid is not None and not worker.killed:
            worker.killed = True
            worker.last_words = f"killed by the broker: {reason}"
            log.warning("%s is killed: %s", worker, reason)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    # -- what workers and the nursery say

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
            self._someone_ready.set()
            log.info("%s is ready", worker)
            self.callbacks.on_ready()
        elif kind == Kind.FATAL:
            worker.last_words = body.decode(errors="replace").strip()

    def _on_born(self, serial: int, pid: int) -> None:
        for worker in self._workers:
            if worker.serial == serial:
                worker.pid = pid

    def _on_exit(self, pid: int, code: int) -> None:
        for worker in self._workers:
            if worker.pid == pid:
                worker.exit_code = code

    def _on_lost(self, worker: WorkerProcess) -> None:
        """The channel is closed. The nursery's word about how it ended comes within a moment."""
        if not worker.lost:
            worker.lost = True
            asyncio.get_running_loop().call_later(_BURY_S, self._bury, worker)

    def _bury(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        runs = list(worker.runs)
        for run in runs:
            self._by_run.pop(run, None)
        if self._stopping:
            self.callbacks.on_death(runs, "the env server is stopping")
            if not self._workers:
                self._all_gone.set()
            return
        self.deaths += 1
        message = f"{worker} died: {worker.last_words or _describe(worker.exit_code)}"
        log.error("%s; it had %d runs", message, len(runs))
        self.callbacks.on_death(runs, message)
        self._owner.start(asyncio.to_thread(self._end_orphans), "orphans")
        if self._too_many():
            self.callbacks.on_final(message)
        else:
            self._owner.start(self._start_one(worker.index), "restart")

    def _too_many(self) -> bool:
        now = time.monotonic()
        self._recent.append(now)
        while now - self._recent[0] > DEATHS_WINDOW_S:
            self._recent.popleft()
        return len(self._recent) >= DEATHS

    def _end_orphans(self) -> None:
        """End what dead workers left running: it has become this process's child."""
        ours = {self._nursery.pid, self.callbacks.spared(), *(worker.pid for worker in self._workers)}
        end_processes(child for child in psutil.Process().children() if child.pid not in ours)

    async def stop(self) -> None:
        """End all workers: STOP, then by force."""
        self._stopping = True
        workers = list(self._workers)
        for worker in workers:
            if worker.channel is not None:
                worker.channel.send(Kind.STOP)
        if workers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._all_gone.wait()
        for worker in self._workers:
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            if worker.channel is not None:
                worker.channel.close()
        await self._owner.close()
        await self._nursery.stop()
        await asyncio.to_thread(self._end_orphans)


def _describe(code: int | None) -> str:
    if code is None:
        return "it is gone"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none is lost from sight (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill these and their descendants, and take note of their ends."""
    for process in list(processes):
        with contextlib.suppress(psutil.Error):
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    each.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
