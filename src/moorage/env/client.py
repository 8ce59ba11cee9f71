"""The client of one env server: asks for tasks and episodes, and is owed an answer for each.

Owns one DEALER socket whose identity is attempt + source, so that a reconnect is the same client. Promises:

- every call ends: with its result, with an `EnvServerError`, or with the caller's own cancellation;
- an episode is returned only once the server said `owned`; from then on the caller releases its payloads;
- for each run exactly one of `ack` or `cancel` is sent, whichever comes first;
- a server that says nothing for `DEAD_S` is dead: every open call ends with an error naming it.

An episode that became owned while its caller was being cancelled has nobody to go to: it is put into
`abandoned`; whoever owns this client calls `take_abandoned` and releases their payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from verifiers.v1.episode import WireEpisode

from moorage.core.aio import TaskOwner
from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.env import protocol as wire
from moorage.env.decode import decode_episode, decode_episodes
from moorage.env.port import Port
from moorage.records.payload import Ledger

TICK_S = 1.0
DEAD_TICKS = 12
"""A server that says nothing for so many ticks of a second is dead."""
CALL_S = 30.0
RETRY_S = 5.0
"""A small request without an answer is sent again after this, under the same id."""
DECIDED_MEMORY = 100_000
log = get_logger(__name__)


@dataclass(frozen=True)
class Hello:
    """What the server is; `num_tasks` is None for an infinite taskset."""

    env_id: str
    num_tasks: int | None
    scores_groups: bool
    store: str
    payload_url: str
    server_id: str


@dataclass(frozen=True)
class Sampled:
    """A task as plain data, and the stream's cursor behind it (give both to `restore` to continue)."""

    task: dict[str, Any]
    epoch: int
    position: int


@dataclass(frozen=True)
class Ping:
    """How the server is."""

    load: dict[str, int]
    in_flight: int
    ledger: Ledger | None


@dataclass(frozen=True)
class RolloutCall:
    """One run. `policy_version` is None for a frozen policy; `deadline_s` counts from receipt."""

    task: dict[str, Any]
    model: str
    endpoint: str
    policy_version: int | None
    sampling: dict[str, Any]
    deadline_s: float


@dataclass(eq=False)
class _Call:
    """A request that is awaited. `ack` is set once its reply is being acknowledged."""

    id: str
    reply: asyncio.Future[bytes]
    is_run: bool = False
    ack: asyncio.Future[bool] | None = None


@dataclass(eq=False)
class _Batch:
    """Ids that go out in one message at the end of this turn of the loop."""

    ids: list[str] = field(default_factory=list)
    handle: asyncio.Handle | None = None
    sent: asyncio.Future[bytes] | None = None


class EnvClient:
    """A connection to one env server, on one event loop."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        run_id: str,
        attempt: int,
        source: str,
    ) -> None:
        self.address = address
        self.source = source
        self.hello: Hello | None = None
        self.dead: str | None = None
        self.streams: set[str] = set()
        self._abandoned: list[WireEpisode] = []
        self._identity = wire.routing_id(run_id, attempt, source)
        self._who = {"token": token, "run_id": run_id, "attempt": attempt, "source": source}
        self._adopt: tuple[str, ...] = ()
        self._prefix = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._calls: dict[str, _Call] = {}
        self._decided: dict[str, None] = {}
        self._acks = _Batch()
        self._cancels = _Batch()
        self._owner = TaskOwner(f"env client {address}")
        self._alive: asyncio.Task[Any] | None = None
        self._quiet_ticks = 0
        self._port: Port | None = None

    # -- life

    async def connect(self, timeout_s: float = 60.0, adopt: Iterable[str] = ()) -> Hello:
        """Connect and take the lease. Raises EnvServerError `refused`, or `unreachable` after `timeout_s`."""
        self._adopt = tuple(adopt)
        if self._port is None:
            self._open_socket()
        try:
            async with asyncio.timeout(timeout_s):
                self.hello = await self._say_hello()
        except TimeoutError:
            raise EnvServerError(
                "unreachable",
                f"env server {self.address} ({self.source}) did not answer within {timeout_s:g} s",
            ) from None
        if not self._alive:
            self._alive = self._owner.start(self._keep_alive(), "keep alive", forever=True)
        return self.hello

    def _open_socket(self) -> None:
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

    async def _say_hello(self) -> Hello:
        body = wire.Hello(**self._who, version=wire.PROTOCOL_VERSION, adopt=self._adopt)
        reply = msgspec.msgpack.decode(await self._ask(b"hello", body, retry=True), type=wire.HelloReply)
        return Hello(
            env_id=reply.env_id,
            num_tasks=reply.num_tasks,
            scores_groups=reply.scores_groups,
            store=reply.store,
            payload_url=reply.payload_url,
            server_id=reply.server_id,
        )

    async def bye(self, retain: Iterable[str] = (), timeout_s: float = CALL_S) -> Ledger | None:
        """End the attempt on this server: it frees all but `retain`. Returns its final account."""
        body = wire.Bye(**self._who, retain=tuple(retain))
        async with self._deadline(timeout_s, "bye"):
            reply = msgspec.msgpack.decode(await self._ask(b"bye", body), type=wire.ByeReply)
        return _ledger(reply.ledger)

    async def close(self) -> None:
        """Disconnect. Open calls end with an error, and the server is told to end their runs."""
        await self._owner.close()
        open_runs = tuple(call.id for call in self._calls.values() if call.is_run and call.ack is None)
        if open_runs and self.dead is None:
            with contextlib.suppress(EnvServerError):
                self._send(b"cancel", wire.Cancel(**self._who, ids=open_runs))
        self._end_all(f"the client of env server {self.address} was closed")
        if self._port is not None:
            self._port.close(linger_ms=500)
            self._port = None
            await asyncio.to_thread(self._context.term)

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- calls

    async def ping(self) -> Ping:
        """Ask how the server is, and settle what both sides think is open."""
        body = wire.Ping(**self._who, open=tuple(call.id for call in self._calls.values() if call.is_run))
        async with self._deadline(CALL_S, "ping"):
            reply = msgspec.msgpack.decode(await self._ask(b"ping", body), type=wire.PingReply)
        if self.hello is not None and reply.server_id != self.hello.server_id:
            self._die("was started anew: what it had is lost")
        for request_id in reply.unknown:
            self._end_run(request_id)
        return Ping(msgspec.structs.asdict(reply.load), reply.in_flight, _ledger(reply.ledger))

    async def sample(self, stream: str, limit: int | None = None) -> Sampled:
        """The next task of `stream`."""
        body = wire.Sample(**self._who, stream=stream, limit=limit)
        async with self._deadline(CALL_S, "sample"):
            reply = msgspec.msgpack.decode(
                await self._ask(b"sample", body, retry=True), type=wire.SampleReply
            )
        self.streams.add(stream)
        return Sampled(msgspec.msgpack.decode(reply.task), reply.epoch, reply.position)

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> None:
        """Continue `stream` behind this cursor (an infinite taskset is read forward to it)."""
        body = wire.Restore(**self._who, stream=stream, epoch=epoch, position=position, limit=limit)
        async with self._deadline(10 * CALL_S, "restore"):
            await self._ask(b"restore", body, retry=True)
        self.streams.add(stream)

    async def close_stream(self, stream: str) -> None:
        """Forget `stream`."""
        async with self._deadline(CALL_S, "close_stream"):
            await self._ask(b"close_stream", wire.CloseStream(**self._who, stream=stream), retry=True)
        self.streams.discard(stream)

    async def run_rollout(self, call: RolloutCall) -> WireEpisode:
        """One episode, owned by the caller on return. Raises EnvServerError."""
        return (await self._run(b"run_rollout", wire.RunRollout(**self._who, **_run_fields(call)), call))[0]

    async def run_group(self, call: RolloutCall, n: int) -> list[WireEpisode]:
        """`n` episodes scored together, whole or not at all."""
        return await self._run(b"run_group", wire.RunGroup(**self._who, **_run_fields(call), n=n), call)

    def take_abandoned(self) -> list[WireEpisode]:
        """Episodes that became ours while their caller was being cancelled: release their payloads."""
        taken, self._abandoned = self._abandoned, []
        return taken

    @property
    def in_flight(self) -> int:
        """Runs that are awaited."""
        return sum(call.is_run for call in self._calls.values())

    # -- a run, from request to ownership

    async def _run(self, method: bytes, body: wire.RunRollout, call: RolloutCall) -> list[WireEpisode]:
        run = self._send(method, body, is_run=True)
        limit_s = call.deadline_s + 3 * wire.CANCEL_S
        try:
            async with asyncio.timeout(limit_s):
                data = await run.reply
            if method == b"run_group":
                episodes = await decode_episodes(data)
            else:
                episodes = [await decode_episode(data)]
        except BaseException as error:
            await self._give_up(run)
            if isinstance(error, TimeoutError):
                raise EnvServerError(
                    "deadline", f"env server {self.address} gave no answer {limit_s:g} s after the request"
                ) from None
            raise
        await self._take_over(run, episodes)
        return episodes

    async def _take_over(self, run: _Call, episodes: list[WireEpisode]) -> None:
        ack = run.ack = asyncio.get_running_loop().create_future()
        ack.add_done_callback(lambda _: self._calls.pop(run.id, None))
        self._decide(run.id)
        self._add(self._acks, run.id)
        try:
            owned = await asyncio.shield(ack)
        except asyncio.CancelledError:
            # whatever else happens to this caller: when the answer comes, the episodes go where it says
            ack.add_done_callback(lambda _: self._orphan(ack, episodes))
            await asyncio.wait({ack}, timeout=2 * wire.PING_S)
            raise
        if not owned:
            raise EnvServerError(
                "worker_died", f"env server {self.address} lost episode {run.id} before its ack"
            )

    def _orphan(self, ack: asyncio.Future[bool], episodes: list[WireEpisode]) -> None:
        """The caller was cancelled. Without an answer they are not ours: `bye` frees what is left."""
        if ack.exception() is None and ack.result():
            self._abandoned += episodes

    async def _give_up(self, run: _Call) -> None:
        """Cancel a run that nobody wants any more, and wait (bounded) until it is ended."""
        failed = run.reply.done() and not run.reply.cancelled() and run.reply.exception() is not None
        self._calls.pop(run.id, None)
        if failed or self.dead or self._port is None:
            return
        self._decide(run.id)
        sent = self._add(self._cancels, run.id)
        with contextlib.suppress(TimeoutError, EnvServerError):
            async with asyncio.timeout(wire.CANCEL_S + 1):
                await asyncio.shield(sent)

    def _decide(self, request_id: str) -> None:
        self._decided[request_id] = None
        if len(self._decided) > DECIDED_MEMORY:
            del self._decided[next(iter(self._decided))]

    # -- messages

    def _send(self, method: bytes, body: wire.Request, *, is_run: bool = False) -> _Call:
        if self.dead:
            raise EnvServerError("unreachable", self.dead)
        if self._port is None:
            raise EnvServerError("unreachable", f"the client of {self.address} is not connected")
        data = wire.encode(body)
        wire.check_size(f"{method.decode()} to env server {self.address}", len(data))
        call_id = f"{self._prefix}-{'run' if is_run else 'ask'}-{next(self._numbers)}"
        call = _Call(call_id, asyncio.get_running_loop().create_future(), is_run)
        if not self._port.send([call.id.encode(), method, data]):
            raise EnvServerError("unreachable", f"env server {self.address} takes no messages")
        self._calls[call.id] = call
        return call

    async def _ask(self, method: bytes, body: wire.Request, *, retry: bool = False) -> bytes:
        """Send a small request and await its reply; `retry`: send it again while there is none."""
        call = self._send(method, body)
        try:
            while retry:
                done, _ = await asyncio.wait({call.reply}, timeout=RETRY_S)
                if done:
                    break
                if self._port is not None:
                    self._port.send([call.id.encode(), method, wire.encode(body)])
            return await call.reply
        finally:
            self._calls.pop(call.id, None)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._quiet_ticks = 0
        if len(frames) != 3:
            log.warning("env server %s sent %d frames instead of 3", self.address, len(frames))
            return
        request_id, kind, body = frames[0].decode(errors="replace"), frames[1], frames[2]
        call = self._calls.get(request_id)
        if call is None:
            if kind == wire.REPLY and request_id not in self._decided and "-run-" in request_id:
                self._add(self._cancels, request_id)
        elif call.reply.done():
            if call.ack is not None and not call.ack.done():
                self._add(self._acks, call.id)  # the ack was lost: the server has sent the reply again
        elif kind == wire.REPLY:
            call.reply.set_result(body)
        else:
            call.reply.set_exception(wire.decode_error(body))

    def _add(self, batch: _Batch, request_id: str) -> asyncio.Future[bytes]:
        """Put an id into the next ack or cancel message. The future ends with that message's answer."""
        loop = asyncio.get_running_loop()
        batch.ids.append(request_id)
        if batch.handle is None:
            batch.sent = loop.create_future()
            batch.sent.add_done_callback(lambda f: f.cancelled() or f.exception())
            batch.handle = loop.call_soon(self._flush, batch)
        assert batch.sent is not None
        return batch.sent

    def _flush(self, batch: _Batch) -> None:
        ids, sent = tuple(batch.ids), batch.sent
        batch.ids, batch.handle, batch.sent = [], None, None
        assert sent is not None
        self._owner.start(self._deliver(batch is self._acks, ids, sent), "acks")

    async def _deliver(self, is_ack: bool, ids: tuple[str, ...], sent: asyncio.Future[bytes]) -> None:
        try:
            if is_ack:
                async with asyncio.timeout(CALL_S):
                    reply = await self._ask(b"ack", wire.Ack(**self._who, ids=ids), retry=True)
                self._on_acked(msgspec.msgpack.decode(reply, type=wire.AckReply))
            else:
                async with asyncio.timeout(wire.CANCEL_S + 1):
                    reply = await self._ask(b"cancel", wire.Cancel(**self._who, ids=ids))
            sent.set_result(reply)
        except (EnvServerError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = EnvServerError("unreachable", f"env server {self.address} did not answer")
            if not sent.done():
                sent.set_exception(error)
            for request_id in ids if is_ack else ():
                call = self._calls.get(request_id)
                if call is not None and call.ack is not None and not call.ack.done():
                    call.ack.set_exception(error)

    def _on_acked(self, reply: wire.AckReply) -> None:
        for ids, owned in ((reply.owned, True), (reply.unknown, False)):
            for request_id in ids:
                call = self._calls.get(request_id)
                if call is not None and call.ack is not None and not call.ack.done():
                    call.ack.set_result(owned)

    # -- liveness

    async def _keep_alive(self) -> None:
        """Ping every 5 s; count silent ticks (not seconds: a loop that was blocked is no dead server)."""
        since_ping = 0.0
        pings: set[asyncio.Task[Any]] = set()
        while True:
            await asyncio.sleep(TICK_S)
            since_ping += TICK_S
            self._quiet_ticks += 1
            if self._quiet_ticks >= DEAD_TICKS and self.dead is None:
                self._die(f"has given no answer for {self._quiet_ticks * TICK_S:g} s")
            if since_ping >= wire.PING_S:
                since_ping = 0.0
                task = self._owner.start(self._ping_quietly(), "ping")
                pings.add(task)
                task.add_done_callback(pings.discard)

    async def _ping_quietly(self) -> None:
        if self.dead:
            return
        try:
            await self.ping()
        except EnvServerError as error:
            if error.kind == "refused":
                await self._renew(error)

    async def _renew(self, error: EnvServerError) -> None:
        """The lease is lost: what was open is over; take it again if the server is the same."""
        self._end_all(f"env server {self.address}: {error}", "cancelled")
        try:
            again = await self._say_hello()
        except EnvServerError as refusal:
            if refusal.kind == "refused":
                self._die(f"refuses this attempt: {refusal}")
            return
        if self.hello is not None and again.server_id != self.hello.server_id:
            self._die("was started anew: what it had is lost")

    def _die(self, what: str) -> None:
        self.dead = f"env server {self.address} ({self.source}) {what}"
        log.error("%s; %d calls end", self.dead, len(self._calls))
        self._end_all(self.dead)

    def _end_all(self, message: str, kind: str = "unreachable") -> None:
        for call in list(self._calls.values()):
            for future in (call.reply, call.ack):
                if future is not None and not future.done():
                    future.set_exception(EnvServerError(kind, message))
                    future.exception()  # whoever awaits it gets it; nobody has to

    def _end_run(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        message = f"env server {self.address} does not know run {request_id} any more"
        if not call.reply.done():
            call.reply.set_exception(EnvServerError("worker_died", message))
        elif call.ack is not None and not call.ack.done():
            call.ack.set_result(False)

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout_s: float, what: str):
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise EnvServerError(
                "unreachable", f"env server {self.address} did not answer {what} within {timeout_s:g} s"
            ) from None


def _run_fields(call: RolloutCall) -> dict[str, Any]:
    return {
        "task": msgspec.Raw(wire.encode(call.task)),
        "model": call.model,
        "endpoint": call.endpoint,
        "policy_version": call.policy_version,
        "sampling": msgspec.Raw(wire.encode(call.sampling)),
        "deadline_s": float(call.deadline_s),
    }


def _ledger(value: dict[str, Any] | None) -> Ledger | None:
    return None if value is None else msgspec.convert(value, Ledger)
