"""The open calls of one client, and the socket under them.

Owns one DEALER socket and the table of calls that await a reply. Promises: a call ends once, with a reply, an
error, or `end_all`; a small request whose answer is lost is sent again under the same id. What to do with a
reply that nobody awaits, or that comes again, is the owner's to say. Does not know what requests mean.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.env import protocol as wire
from moorage.env.port import Port

RETRY_S = 5.0
"""A small request without an answer is sent again after this, under the same id."""
_RUN = "run"
log = get_logger(__name__)


@dataclass(eq=False)
class Call:
    """A request that is awaited. `ack` is set once its reply is being acknowledged."""

    id: str
    reply: asyncio.Future[bytes]
    is_run: bool = False
    ack: asyncio.Future[bool] | None = None

    def end_ack(self, owned: bool | EnvServerError) -> None:
        """Say what became of the acknowledgement, if somebody waits for that still."""
        if self.ack is None or self.ack.done():
            return
        if isinstance(owned, EnvServerError):
            self.ack.set_exception(owned)
        else:
            self.ack.set_result(owned)


class Calls:
    """On one event loop."""

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        on_stray: Callable[[str], object],
        on_repeat: Callable[[Call], object],
    ) -> None:
        """`on_stray(id)`: a run's reply that nobody awaits. `on_repeat(call)`: a reply came once more."""
        self.address = address
        self.dead: str | None = None
        self.quiet_ticks = 0
        self._identity = identity
        self._on_stray = on_stray
        self._on_repeat = on_repeat
        self._prefix = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._open: dict[str, Call] = {}
        self._port: Port | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_connected(self) -> bool:
        return self._port is not None

    @property
    def runs(self) -> list[Call]:
        """The runs that are awaited."""
        return [call for call in self._open.values() if call.is_run]

    def get(self, call_id: str) -> Call | None:
        return self._open.get(call_id)

    def forget(self, call: Call) -> None:
        self._open.pop(call.id, None)

    def connect(self) -> None:
        """Open the socket; a reconnect is the same client. Does nothing when it is open."""
        if self._port is not None:
            return
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, self._identity),
            (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, 100_000),
            (zmq.RCVHWM, 100_000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.LINGER, 0),
        ):
            socket.setsockopt(option, value)
        socket.connect(self.address)
        self._port = Port(socket, self._on_frames)

    async def close(self) -> None:
        """Disconnect, after a moment for what was sent."""
        if self._port is not None:
            self._port.close(linger_ms=500)
            self._port = None
            await asyncio.to_thread(self._context.term)

    def send(self, method: bytes, body: wire.Request, *, is_run: bool = False) -> Call:
        """Send a request. Raises EnvServerError: `unreachable`, or too large."""
        if self.dead:
            raise EnvServerError("unreachable", self.dead)
        if self._port is None:
            raise EnvServerError("unreachable", f"the client of {self.address} is not connected")
        data = wire.encode(body)
        wire.check_size(f"{method.decode()} to env server {self.address}", len(data))
        call_id = f"{self._prefix}-{_RUN if is_run else 'ask'}-{next(self._numbers)}"
        call = Call(call_id, asyncio.get_running_loop().create_future(), is_run)
        if not self._port.send([call.id.encode(), method, data]):
            raise EnvServerError("unreachable", f"env server {self.address} takes no messages")
        self._open[call.id] = call
        return call

    async def ask(self, method: bytes, body: wire.Request, *, retry: bool = False) -> bytes:
        """Send a small request and await its reply; `retry`: send it again while there is none."""
        call = self.send(method, body)
        try:
            while retry:
                done, _ = await asyncio.wait({call.reply}, timeout=RETRY_S)
                if done:
                    break
                if self._port is not None:
                    self._port.send([call.id.encode(), method, wire.encode(body)])
            return await call.reply
        finally:
            self.forget(call)

    def _on_frames(self, frames: list[bytes]) -> None:
        self.quiet_ticks = 0
        if len(frames) != 3:
            log.warning("env server %s sent %d frames instead of 3", self.address, len(frames))
            return
        request_id, kind, body = frames[0].decode(errors="replace"), frames[1], frames[2]
        call = self._open.get(request_id)
        if call is None:
            if kind == wire.REPLY and f"-{_RUN}-" in request_id:
                self._on_stray(request_id)
        elif call.reply.done():
            self._on_repeat(call)
        elif kind == wire.REPLY:
            call.reply.set_result(body)
        else:
            call.reply.set_exception(wire.decode_error(body))

    def end_all(self, message: str, kind: str = "unreachable") -> None:
        """Every open call ends with this error."""
        for call in list(self._open.values()):
            for future in (call.reply, call.ack):
                if future is not None and not future.done():
                    future.set_exception(EnvServerError(kind, message))
                    future.exception()  # whoever awaits it gets it; nobody has to

    def end_run(self, request_id: str) -> None:
        """The server does not know this run any more."""
        call = self._open.get(request_id)
        if call is None:
            return
        if call.reply.done():
            call.end_ack(False)
        else:
            message = f"env server {self.address} does not know run {request_id} any more"
            call.reply.set_exception(EnvServerError("worker_died", message))
