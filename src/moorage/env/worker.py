"""A worker: one process that owns an environment and runs its episodes.

Owns the environment's serving resources, and one asyncio task for each run the broker gave it. Promises:

- every RUN and GROUP ends in exactly one DONE or FAILED, after which nothing is written for that request;
- a run ends by its deadline, or by CANCEL, as soon as the environment lets go of it;
- when the broker is gone the process ends, even from a busy loop (a thread watches the channel).

It does not know clients, leases or streams.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from moorage.config.base import make_config
from moorage.config.env import EnvServerConfig
from moorage.core.errors import EnvServerError, MoorageError
from moorage.core.log import get_logger, setup_logging
from moorage.env.channel import Channel, Kind
from moorage.env.protocol import RunGroup, RunRollout, decode_request, encode_error

BEAT_S = 0.5
ORPHAN_GRACE_S = 5.0
log = get_logger(__name__)


class Assignment(msgspec.Struct, kw_only=True):
    """What the broker tells a worker at its start."""

    server: dict[str, Any]
    env_data: dict[str, Any]
    index: int
    attempt_key: str
    spool_root: str
    store: str
    payload_url: str


class Worker:
    """The runs of one process."""

    def __init__(self, assignment: Assignment) -> None:
        from moorage.env.runner import Runner

        self.assignment = assignment
        self.config = make_config(EnvServerConfig, assignment.server)
        self.runner = Runner(self.config, assignment)
        self.runs: dict[bytes, asyncio.Task[None]] = {}
        self.stop = asyncio.Event()
        self.channel: Channel | None = None

    async def serve(self, channel: Channel) -> None:
        """Run until the broker says STOP or is gone."""
        self.channel = channel
        async with self.runner.serving():
            channel.send(Kind.READY)
            beat = asyncio.create_task(self._beat())
            await self.stop.wait()
            beat.cancel()
            for task in list(self.runs.values()):
                task.cancel()
            if self.runs:
                await asyncio.wait(list(self.runs.values()), timeout=ORPHAN_GRACE_S)

    def on_message(self, kind: int, request_id: bytes, number: float, body: bytes) -> None:
        """Take a message of the broker."""
        if kind in (Kind.RUN, Kind.GROUP):
            method = b"run_group" if kind == Kind.GROUP else b"run_rollout"
            task = asyncio.create_task(self._run(request_id, method, number, body))
            self.runs[request_id] = task
            task.add_done_callback(lambda task: self._on_done(request_id, task))
        elif kind == Kind.CANCEL:
            task = self.runs.get(request_id)
            if task is not None:
                task.cancel()
        elif kind == Kind.STOP:
            self.stop.set()

    def _on_done(self, request_id: bytes, task: asyncio.Task[None]) -> None:
        """A task cancelled before its first step never gets to say how it ended."""
        del self.runs[request_id]
        if task.cancelled() and self.channel is not None:
            body = encode_error("cancelled", "the run was cancelled before it began")
            self.channel.send(Kind.FAILED, request_id, 0, body)

    async def _run(self, request_id: bytes, method: bytes, deadline_s: float, body: bytes) -> None:
        assert self.channel is not None
        outcome = await self._outcome(request_id, method, deadline_s, body)
        kept = self.runner.keeping.take(request_id.decode())
        if isinstance(outcome, EnvServerError):
            self.channel.send(Kind.FAILED, request_id, kept, encode_error(outcome.kind, str(outcome)))
        else:
            self.channel.send(Kind.DONE, request_id, kept, outcome)

    async def _outcome(
        self, request_id: bytes, method: bytes, deadline_s: float, body: bytes
    ) -> bytes | EnvServerError:
        """The reply's body, or the error that stands for it: every ending of a run is one of both."""
        limit = asyncio.timeout(deadline_s)
        try:
            request = decode_request(method, body)
            assert isinstance(request, RunRollout)
            async with limit:
                n = request.n if isinstance(request, RunGroup) else None
                return await self.runner.run(request_id.decode(), request, n, deadline_s)
        except (Exception, asyncio.CancelledError) as error:
            if limit.expired():  # whatever the run made of being stopped
                return EnvServerError("deadline", f"the run did not end within {deadline_s:g} s (deadline_s)")
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                return EnvServerError("cancelled", "the run was cancelled")
            if not isinstance(error, EnvServerError):
                log.warning("run %s failed", request_id.decode(), exc_info=True)
            return _explain(error)

    async def _beat(self) -> None:
        assert self.channel is not None
        while True:
            self.channel.send(Kind.BEAT)
            await asyncio.sleep(BEAT_S)


def _is_cancelled() -> bool:
    """Whether the run's task was told to end; a cancellation of the environment's own is its error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _explain(error: BaseException) -> EnvServerError:
    """What the environment's own code raised, without the groups that our tasks wrap it in."""
    leaves = list(_leaves(error))
    ours = [leaf for leaf in leaves if isinstance(leaf, EnvServerError)]
    if ours:
        return ours[0]
    texts = dict.fromkeys(f"{type(leaf).__name__}: {leaf}".removesuffix(": ") for leaf in leaves)
    return EnvServerError("task_error", "; ".join(texts))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


async def _serve(sock: socket.socket) -> None:
    first: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
    worker: Worker | None = None

    def on_message(kind: int, request_id: bytes, number: float, body: bytes) -> None:
        if worker is not None:
            worker.on_message(kind, request_id, number, body)
        elif kind == Kind.CONFIG:
            first.set_result(msgspec.msgpack.decode(body, type=Assignment))

    def on_lost() -> None:
        if worker is not None:
            worker.stop.set()
        elif not first.done():
            first.set_exception(ConnectionError("the broker is gone"))

    channel = await Channel.open(sock, on_message, on_lost)
    assignment = await first
    setup_logging(f"worker.{assignment.index}")
    try:
        worker = Worker(assignment)
        await worker.serve(channel)
    except BaseException as error:
        channel.send(Kind.FATAL, body=_last_words(error).encode())
        raise
    finally:
        channel.close()
        await asyncio.sleep(0)


def _last_words(error: BaseException) -> str:
    if isinstance(error, MoorageError):
        return str(error)
    return "".join(traceback.format_exception(error))[-4000:]


def watch_broker(sock: socket.socket) -> None:
    """End this process when the broker is gone and the loop has not noticed within a grace (a busy loop)."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()
        time.sleep(ORPHAN_GRACE_S * 2)
        os._exit(70)

    threading.Thread(target=watch, name="watch-broker", daemon=True).start()


def run_worker(fd: int) -> int:
    """Serve on the inherited socket `fd` until told to stop. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the broker decides when a worker stops
    sock = socket.socket(fileno=fd)
    watch_broker(sock)
    try:
        asyncio.run(_serve(sock))
    except ConnectionError:
        return 0
    except Exception as error:  # noqa: BLE001 - the last thing this process does is to say why
        print(_last_words(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_worker(int(json.loads(sys.argv[1]))))
