"""The nursery: a process that has the environment library loaded and forks workers from it.

Importing the library costs seconds and 200 MiB in each process. A fork costs milliseconds and shares those
pages, so a worker that died is replaced at once. It is safe because this process never runs a thread or an
event loop. Promises: one worker per request, on the socket that came with it; the exit of each is reported;
when the broker is gone the nursery ends (its workers notice by themselves).

Messages over a SEQPACKET pair: the broker sends `fork` and a descriptor; the nursery answers
`{"pid": n, "serial": k}` for the k-th request, and later `{"exit": pid, "code": c}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from moorage.core.collector import relax_collector
from moorage.core.log import get_logger

PRELOAD = (
    "verifiers.v1",
    "verifiers.v1.envs",
    "verifiers.v1.harnesses",
    "verifiers.v1.judges",
    "verifiers.v1.mcp",
    "verifiers.v1.tasksets",  # its loader imports this whole package while it looks for any taskset
    "moorage.env.direct",
    "moorage.env.runner",
)
STOP_S = 5.0
log = get_logger(__name__)


class Nursery:
    """The broker's side. Starts the process on first use, and again when it is gone."""

    def __init__(self, model_path: str, renderer: str = "auto") -> None:
        """The tokenizer of `model_path` is loaded once too, for all that loading it imports."""
        self._argv = [model_path, renderer]
        self.on_born: Callable[[int, int], None] = lambda *_: None
        """Called from the loop with the serial of a fork and the process that it became."""
        self.on_exit: Callable[[int, int], None] = lambda *_: None
        """Called from the loop with a worker that has ended and its exit code."""
        self._reading = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._serial = 0
        self._base = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fork(self, worker_end: socket.socket) -> int:
        """Ask for a worker on `worker_end` (which is ours no more); the serial under which it is born."""
        self.start()
        assert self._socket is not None
        if not self._reading:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._serial += 1
        try:
            socket.send_fds(self._socket, [b"fork"], [worker_end.fileno()])
        except OSError:  # it died since: whoever watches the channel sees a worker that never was
            log.warning("the nursery is gone")
            self._lose()
        finally:
            worker_end.close()
        return self._serial

    def start(self) -> None:
        """Begin loading the library, if that has not begun. Needs no loop, so it can be done early."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moorage.env.nursery", str(theirs.fileno()), *self._argv],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self._socket = ours
        self._base = self._serial

    def _read(self) -> None:
        assert self._socket is not None
        while True:
            try:
                message = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lose()
                return
            said = json.loads(message)
            if "exit" in said:
                self.on_exit(said["exit"], said["code"])
            else:
                self.on_born(self._base + said["serial"], said["pid"])

    def _lose(self) -> None:
        if self._socket is not None:
            if self._reading:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                self._reading = False
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.poll()

    async def stop(self) -> None:
        """End the process."""
        self._lose()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


def run_nursery(fd: int, model_path: str, renderer: str) -> int:
    """Serve fork requests on `fd` until the broker is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the broker decides
    relax_collector()
    for name in PRELOAD:
        importlib.import_module(name)
    _load_renderer(model_path, renderer)
    gc.collect()
    gc.freeze()  # the collector would write to every page that the workers share
    broker = socket.socket(fileno=fd)
    wake_out, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(broker.fileno(), select.POLLIN)
    poll.register(wake_out, select.POLLIN)
    serial = 0
    while True:
        ready = {fileno for fileno, _ in poll.poll()}
        if wake_out in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_out, 4096)
            _report_exits(broker)
        if broker.fileno() in ready:
            try:
                message, fds, _, _ = socket.recv_fds(broker, 64, 1)
            except OSError:
                return 0
            if not message:
                return 0
            serial += 1
            pid = os.fork()
            if pid == 0:
                for number in (wake_out, wake_in):
                    os.close(number)
                broker.close()
                _become_worker(fds[0])
            os.close(fds[0])
            _tell(broker, {"pid": pid, "serial": serial})


def _load_renderer(model_path: str, renderer: str) -> None:
    from moorage.engine.render import RendererPool

    with contextlib.suppress(Exception):  # every worker tries it again, and says what is wrong
        RendererPool(model_path, renderer)


def _become_worker(fd: int) -> None:
    """In the fork: be a process of its own, and serve. Does not return."""
    from moorage.env.worker import run_worker

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        code = run_worker(fd)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report_exits(broker: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(broker, {"exit": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(broker: socket.socket, what: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the broker is gone: the next read says so
        broker.send(json.dumps(what).encode())


if __name__ == "__main__":
    sys.exit(run_nursery(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
