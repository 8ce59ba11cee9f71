"""The client of one env server: asks for tasks and episodes, and is owed an answer for each.

It decides about runs and watches over the server; `calls` has the socket and the open calls, `verdicts`
delivers acks and cancels. Its identity is attempt + source, so that a reconnect is the same client. Promises:

- every call ends: with its result, with an `EnvServerError`, or with the caller's own cancellation;
- an episode is returned only once the server said `owned`; from then on the caller releases its payloads;
- for each run exactly one of `ack` or `cancel` is sent, whichever comes first;
- a server that says nothing for `DEAD_TICKS` ticks is dead: every open call ends with an error naming it;
- after `bye` it takes no lease any more.

An episode that became owned while its caller was being cancelled has nobody to go to: it is put into
`abandoned`; whoever owns this client calls `take_abandoned` and releases their payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from moorage.core.aio import TaskOwner
from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.env import protocol as wire
from moorage.env.calls import Call, Calls
from moorage.env.decode import decode_episode, decode_episodes
from moorage.env.verdicts import Verdicts
from moorage.records.payload import Ledger

TICK_S = 1.0
DEAD_TICKS = 12
"""A server that says nothing for so many ticks of a second is dead."""
CALL_S = 30.0
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
    """A task, and the stream's cursor behind it (give that to `restore` to continue).

    `task` is plain: `type`, `data`, `key` and `hash`, to be given back as it is in a `RolloutCall`.
    """

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
    """One run of a `Sampled.task`. `policy_version` is None for a frozen policy.

    `deadline_s` counts from receipt.
    """

    task: dict[str, Any]
    model: str
    endpoint: str
    policy_version: int | None
    sampling: dict[str, Any]
    deadline_s: float


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
        self.streams: set[str] = set()
        self._abandoned: list[WireEpisode] = []
        self._identity = wire.routing_id(run_id, attempt, source)
        self._who = {"token": token, "run_id": run_id, "attempt": attempt, "source": source}
        self._adopt: tuple[str, ...] = ()
        self._decided: dict[str, None] = {}
        self._owner = TaskOwner(f"env client {address}")
        self._calls = Calls(address, self._identity, on_stray=self._on_stray, on_repeat=self._on_repeat)
        self._verdicts = Verdicts(self._calls, self._who, self._owner)
        self._alive: asyncio.Task[Any] | None = None
        self._said_bye = False

    # -- life

    async def connect(self, timeout_s: float = 60.0, adopt: Iterable[str] = ()) -> Hello:
        """Connect and take the lease. Raises EnvServerError `refused`, or `unreachable` after `timeout_s`."""
        self._adopt = tuple(adopt)
        self._calls.connect()
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

    async def _say_hello(self) -> Hello:
        body = wire.Hello(**self._who, version=wire.PROTOCOL_VERSION, adopt=self._adopt)
        reply = msgspec.msgpack.decode(
            await self._calls.ask(b"hello", body, retry=True), type=wire.HelloReply
        )
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
        self._said_bye = True
        body = wire.Bye(**self._who, retain=tuple(retain))
        async with self._deadline(timeout_s, "bye"):
            reply = msgspec.msgpack.decode(await self._calls.ask(b"bye", body), type=wire.ByeReply)
        return _ledger(reply.ledger)

    async def close(self) -> None:
        """Disconnect. Open calls end with an error, and the server is told to end their runs."""
        await self._owner.close()
        open_runs = tuple(call.id for call in self._calls.runs if call.ack is None)
        if open_runs and self.dead is None:
            with contextlib.suppress(EnvServerError):
                self._calls.send(b"cancel", wire.Cancel(**self._who, ids=open_runs))
        self._calls.end_all(f"the client of env server {self.address} was closed")
        await self._calls.close()

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- calls

    async def ping(self) -> Ping:
        """Ask how the server is, and settle what both sides think is open."""
        body = wire.Ping(**self._who, open=tuple(call.id for call in self._calls.runs))
        async with self._deadline(CALL_S, "ping"):
            reply = msgspec.msgpack.decode(await self._calls.ask(b"ping", body), type=wire.PingReply)
        if self.hello is not None and reply.server_id != self.hello.server_id:
            self._die("was started anew: what it had is lost")
        for request_id in reply.unknown:
            self._calls.end_run(request_id)
        return Ping(msgspec.structs.asdict(reply.load), reply.in_flight, _ledger(reply.ledger))

    async def sample(self, stream: str, limit: int | None = None) -> Sampled:
        """The next task of `stream`."""
        body = wire.Sample(**self._who, stream=stream, limit=limit)
        async with self._deadline(CALL_S, "sample"):
            reply = msgspec.msgpack.decode(
                await self._calls.ask(b"sample", body, retry=True), type=wire.SampleReply
            )
        self.streams.add(stream)
        return Sampled(msgspec.msgpack.decode(reply.task), reply.epoch, reply.position)

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> None:
        """Continue `stream` behind this cursor (an infinite taskset is read forward to it)."""
        body = wire.Restore(**self._who, stream=stream, epoch=epoch, position=position, limit=limit)
        async with self._deadline(10 * CALL_S, "restore"):
            await self._calls.ask(b"restore", body, retry=True)
        self.streams.add(stream)

    async def close_stream(self, stream: str) -> None:
        """Forget `stream`."""
        async with self._deadline(CALL_S, "close_stream"):
            await self._calls.ask(b"close_stream", wire.CloseStream(**self._who, stream=stream), retry=True)
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
    def dead(self) -> str | None:
        """Why the server is given up, None while it is not."""
        return self._calls.dead

    @property
    def in_flight(self) -> int:
        """Runs that are awaited."""
        return len(self._calls.runs)

    # -- a run, from request to ownership

    async def _run(self, method: bytes, body: wire.RunRollout, call: RolloutCall) -> list[WireEpisode]:
        run = self._calls.send(method, body, is_run=True)
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

    async def _take_over(self, run: Call, episodes: list[WireEpisode]) -> None:
        ack = run.ack = asyncio.get_running_loop().create_future()
        ack.add_done_callback(lambda _: self._calls.forget(run))
        self._decide(run.id)
        self._verdicts.ack(run)
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

    async def _give_up(self, run: Call) -> None:
        """Cancel a run that nobody wants any more, and wait (bounded) until it is ended."""
        failed = run.reply.done() and not run.reply.cancelled() and run.reply.exception() is not None
        self._calls.forget(run)
        if failed or self.dead or not self._calls.is_connected:
            return
        self._decide(run.id)
        sent = self._verdicts.cancel(run.id)
        with contextlib.suppress(TimeoutError, EnvServerError):
            async with asyncio.timeout(wire.CANCEL_S + 1):
                await asyncio.shield(sent)

    def _decide(self, request_id: str) -> None:
        self._decided[request_id] = None
        if len(self._decided) > DECIDED_MEMORY:
            del self._decided[next(iter(self._decided))]

    def _on_stray(self, request_id: str) -> None:
        """A reply to a run that nobody awaits, and that was not decided upon: it is cancelled."""
        if request_id not in self._decided:
            self._verdicts.cancel(request_id)

    def _on_repeat(self, call: Call) -> None:
        """The server has sent the reply again: the ack was lost."""
        if call.ack is not None and not call.ack.done():
            self._verdicts.ack(call)

    # -- liveness

    async def _keep_alive(self) -> None:
        """Ping every 5 s; count silent ticks (not seconds: a loop that was blocked is no dead server)."""
        since_ping = 0.0
        pings: set[asyncio.Task[Any]] = set()
        while True:
            await asyncio.sleep(TICK_S)
            if self._said_bye:
                continue
            since_ping += TICK_S
            self._calls.quiet_ticks += 1
            if self._calls.quiet_ticks >= DEAD_TICKS and self.dead is None:
                self._die(f"has given no answer for {self._calls.quiet_ticks * TICK_S:g} s")
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
            if error.kind == "refused" and not self._said_bye:
                await self._renew(error)

    async def _renew(self, error: EnvServerError) -> None:
        """The lease is lost: what was open is over; take it again if the server is the same."""
        self._calls.end_all(f"env server {self.address}: {error}", "cancelled")
        try:
            again = await self._say_hello()
        except EnvServerError as refusal:
            if refusal.kind == "refused":
                self._die(f"refuses this attempt: {refusal}")
            return
        if self.hello is not None and again.server_id != self.hello.server_id:
            self._die("was started anew: what it had is lost")

    def _die(self, what: str) -> None:
        self._calls.dead = dead = f"env server {self.address} ({self.source}) {what}"
        log.error("%s; %d calls end", dead, len(self._calls))
        self._calls.end_all(dead)

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
