"""The broker: the one process of an env server that clients talk to.

| part | does | unblocked by |
|---|---|---|
| `Port.on_frames` | reads requests, answers or queues them | clients |
| `Workers` callbacks | tell `Runs` how runs ended | workers, their deaths |
| `_tick_forever` | deadlines, late cancels, leases, undelivered answers | the clock |
| `_stop_wanted` | ends the server in order | SIGTERM, parent's death, third worker death |

Promises: no request is left without an answer; bodies of tasks and episodes are forwarded, never decoded
here. Rules live in `delivery`, `leases` and `streams`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from moorage.config.env import EnvServerConfig
from moorage.core.aio import TaskOwner
from moorage.core.errors import ConfigError, EnvServerError
from moorage.core.log import get_logger
from moorage.core.net import advertised_host, node_name
from moorage.core.secret import TOKEN_VARIABLE
from moorage.env import protocol as wire
from moorage.env.answers import Answers
from moorage.env.delivery import State
from moorage.env.environment import Environment
from moorage.env.leases import Holder, Leases, holder_of
from moorage.env.nursery import Nursery
from moorage.env.port import Port
from moorage.env.runs import Runs
from moorage.env.store import Store
from moorage.env.worker import Assignment
from moorage.env.workers import Callbacks, Workers

TICK_S = 0.25
DRAIN_S = 10.0
READY_S = 300.0
log = get_logger(__name__)


@dataclass
class Counts:
    """What went wrong so far."""

    malformed: int = 0
    disconnected: int = 0


class Broker:
    """One env server."""

    def __init__(
        self,
        config: EnvServerConfig,
        token: str,
        environment: Environment,
        nursery: Nursery | None = None,
        lease_s: float = wire.LEASE_S,
    ) -> None:
        self._nursery = nursery or Nursery(config.model_path, config.renderer)
        self.config = config
        self.token = token
        self.environment = environment
        self.streams = environment.streams
        self.server_id = uuid.uuid4().hex
        self.store_name = f"{config.source.name}.{node_name()}"
        self.store = Store(config, f"{config.split}/{self.store_name}", self.server_id, token)
        self.leases = Leases(config.run_id, config.attempt)
        self.lease_s = lease_s
        self.counts = Counts()
        self.address = ""
        self.fatal: str | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self._owner = TaskOwner("broker")
        self._busy: set[tuple[bytes, bytes]] = set()
        self._stream_thread = ThreadPoolExecutor(1, "streams")
        self._draining = False
        self._changing = asyncio.Lock()
        """Held while one attempt ends or follows another: nobody is let in until all is cleared away."""
        self._stop_wanted = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Bind, start payload service and workers, publish the address when one worker is ready."""
        await self.store.start()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, 20_000),
            (zmq.LINGER, 0),
        ):
            socket.setsockopt(option, value)
        host = self.config.source.host
        try:
            socket.bind(f"tcp://{host}:{self.config.rpc_port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"rpc port {self.config.rpc_port} on {host}: {error}; choose another") from None
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self.address = f"tcp://{advertised_host(host)}:{port}"
        self._monitor = Port(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), self._on_disconnect)
        self._port = Port(socket, self._on_frames)
        self._answers = Answers(self._port)
        self._workers = Workers(
            self.config.source.num_workers,
            self.config.source.max_concurrent,
            self._assignment(),
            Callbacks(
                on_ended=lambda *ending: self._runs.on_ended(*ending),
                on_ready=lambda: self._runs.pump(),
                on_death=lambda *death: self._runs.on_death(*death),
                on_final=self._on_final,
                spared=lambda: self.store.service_pid,
            ),
            self._nursery,
        )
        self._runs = Runs(self._answers, self.store, self._workers)
        await self._workers.start()
        self._owner.start(self._tick_forever(), "tick", forever=True)
        self._owner.start(self.store.watch(), "payload service", forever=True)
        self._watching = asyncio.create_task(self._watch_failure())
        ready = asyncio.create_task(self._workers.wait_ready(READY_S))
        stop = asyncio.create_task(self._stop_wanted.wait())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ready.done():
            ready.cancel()
        elif ready.exception() is not None:
            self.fail(f"no worker became ready within {READY_S:g} s")

    def _assignment(self) -> Assignment:
        return Assignment(
            server=self.config.model_dump(mode="json"),
            env_data=self.environment.env_data,
            index=0,
            attempt_key=self.store.attempt_key,
            spool_root=str(self.store.root),
            store=self.store.name,
            payload_url=self.store.url,
        )

    async def _watch_failure(self) -> None:
        failure = await self._owner.wait_failed()
        log.error("the broker failed", exc_info=failure)
        self.fail(f"{type(failure).__name__}: {failure}")

    def fail(self, message: str) -> None:
        """Stop the server with this as its last error."""
        if self.fatal is None:
            self.fatal = message
        self._stop_wanted.set()

    def request_stop(self) -> None:
        """Begin the orderly stop."""
        self._stop_wanted.set()

    async def wait_stopped(self) -> None:
        """Serve until a stop is wanted, then drain and end everything."""
        await self._stop_wanted.wait()
        self._draining = True
        await self._runs.wait_over(None, 0 if self.fatal else DRAIN_S)
        if len(self._runs):
            log.warning("%d requests are open and are ended: %s", len(self._runs), self._runs.describe())
        await self.close()

    async def close(self) -> None:
        """Answer what is left, end the workers, free what nobody owns."""
        self._draining = True
        reason = f"the env server is stopping: {self.fatal}" if self.fatal else "the env server is stopping"
        self._runs.drop_all("server_stopping", reason)
        self._runs.answer_cancels()
        await self._workers.stop()
        self._watching.cancel()
        await self._owner.close()
        self._stream_thread.shutdown(wait=False)
        await self.store.stop()
        self._monitor.close()
        self._port.socket.disable_monitor()
        self._port.close(linger_ms=1000)
        await asyncio.to_thread(self._context.term)

    # -- requests

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or not wire.REQUEST_ID.fullmatch(frames[1]):
            self.counts.malformed += 1
            if len(frames) > 2 and wire.REQUEST_ID.fullmatch(frames[1]):
                message = f"a request has 3 frames [id, method, body], not {len(frames) - 1}"
                self._answers.error(frames[0], frames[1], "bad_request", message)
            return
        identity, frame_id, method, body = frames
        try:
            self._handle(identity, frame_id, method, body)
        except EnvServerError as error:
            if error.kind == "bad_request":
                self.counts.malformed += 1
            self._answers.error(identity, frame_id, error.kind, str(error))

    def _handle(self, identity: bytes, frame_id: bytes, method: bytes, body: bytes) -> None:
        request = self._decode(method, body)
        if not wire.is_token(request.token, self.token):
            raise EnvServerError(
                "refused", f"wrong token: it is not the secret of this run ({TOKEN_VARIABLE})"
            )
        holder = holder_of(request)
        if not isinstance(request, wire.Hello | wire.Bye):
            self.leases.check(holder, time.monotonic())
        match request:
            case wire.Hello():
                self._later(identity, frame_id, self._hello(holder, request))
            case wire.Ping():
                self._later(identity, frame_id, self._ping(identity, holder, request))
            case wire.Ack():
                self._runs.ack(identity, frame_id, holder, request)
            case wire.Cancel():
                self._runs.cancel(identity, frame_id, holder, request)
            case wire.RunRollout():  # RunGroup is one
                self._check_run(request)
                self._runs.admit(identity, frame_id, method, body, holder, request)
            case wire.Bye():
                self._later(identity, frame_id, self._bye(holder, request))
            case _:
                self._once(identity, frame_id, request)

    def _decode(self, method: bytes, body: bytes) -> wire.Request:
        try:
            return wire.decode_request(method, body)
        except EnvServerError:
            if method == b"hello" and (version := _version_of(body)) not in (None, wire.PROTOCOL_VERSION):
                raise _version_mismatch(version) from None
            raise

    async def _hello(self, holder: Holder, request: wire.Hello) -> msgspec.Struct:
        if request.version != wire.PROTOCOL_VERSION:
            raise _version_mismatch(request.version)
        async with self._changing:
            before = self.leases.hello(holder, time.monotonic())
            if before is not None:
                log.info("%s takes over from %s", holder, before)
                await self._clear(f"{holder} has taken over", "env_server", request.adopt)
                await self.store.begin_account()
            was_ready = self.store.ready
            await self.store.adopt(request.adopt)
        if not was_ready:
            self.on_ready()
        return wire.HelloReply(
            env_id=self.environment.env_id,
            num_tasks=self.streams.num_tasks,
            scores_groups=self.environment.scores_groups,
            store=self.store.name,
            payload_url=self.store.url,
            server_id=self.server_id,
            versions=_versions(),
        )

    async def _ping(self, identity: bytes, holder: Holder, request: wire.Ping) -> msgspec.Struct:
        unknown = self._runs.settle(identity, holder, request.open)
        delivery = self._runs.delivery
        return wire.PingReply(
            server_id=self.server_id,
            load=self._load(),
            in_flight=delivery.count(State.RUNNING) + delivery.count(State.QUEUED),
            ledger=await self.store.ledger(),
            unknown=tuple(unknown),
        )

    def _load(self) -> wire.Load:
        delivery = self._runs.delivery
        return wire.Load(
            workers=self._workers.num_ready,
            running=delivery.count(State.RUNNING),
            queued=delivery.count(State.QUEUED),
            unacknowledged=delivery.count(State.REPLIED),
            streams=len(self.streams),
            malformed=self.counts.malformed,
            disconnected=self.counts.disconnected,
            worker_deaths=self._workers.deaths,
            payload_restarts=self.store.restarts,
        )

    def _once(self, identity: bytes, frame_id: bytes, request: wire.Request) -> None:
        """Answer a request that must have its effect once, however often it is sent."""
        key = (identity, frame_id)
        if key in self._busy or self._answers.repeat(identity, frame_id):
            return
        self._busy.add(key)
        if self.environment.is_quick:
            self._end_once(key, lambda: self.environment.stream_call(request))
        else:
            self._owner.start(self._once_later(key, request), "stream")

    async def _once_later(self, key: tuple[bytes, bytes], request: wire.Request) -> None:
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._stream_thread, self.environment.stream_call, request)
        await asyncio.wait({call})
        self._end_once(key, call.result)

    def _end_once(self, key: tuple[bytes, bytes], result: Callable[[], bytes]) -> None:
        try:
            kind, body = wire.REPLY, result()
        except EnvServerError as error:
            kind, body = wire.ERROR, wire.encode_error(error.kind, str(error))
        except Exception as error:  # the taskset's own code: the client is told, the server lives on
            log.warning("the taskset failed", exc_info=True)
            text = f"the taskset failed: {type(error).__name__}: {error}"
            kind, body = wire.ERROR, wire.encode_error("task_error", text)
        self._busy.discard(key)
        self._answers.remember(*key, kind, body)

    def _check_run(self, request: wire.RunRollout) -> None:
        if self._draining:
            raise EnvServerError("server_stopping", "the env server is stopping")
        if isinstance(request, wire.RunGroup) and not self.environment.scores_groups:
            raise EnvServerError(
                "bad_request",
                f"{self.environment.env_id} scores no groups (it defines no score_group): use run_rollout",
            )

    def _on_final(self, message: str) -> None:
        self.fail(f"three workers died within a minute; the last: {message}")

    async def _bye(self, holder: Holder, request: wire.Bye) -> msgspec.Struct:
        async with self._changing:
            self.leases.bye(holder)
            await self._clear("the run has said bye", "shutdown", request.retain)
            return wire.ByeReply(ledger=await self.store.ledger(fresh=True))

    async def _clear(self, why: str, by: str, spared: tuple[str, ...]) -> None:
        """End all that the attempt before had here: runs, streams, and payloads but those `spared`.

        Its leases are gone, so nothing is added. Waits at most `CANCEL_S` for its runs to end.
        """
        holders = self._runs.drop_all("cancelled", why)
        self._runs.delivery.forget_owned()
        if self.environment.is_quick:
            self.streams.close_all()
        else:  # behind the stream calls that wait there, which would open theirs again, and before later ones
            self._stream_thread.submit(self.streams.close_all)
        await self._runs.wait_over(holders, wire.CANCEL_S)
        await self.store.discard_all(by, spared)

    # -- answers

    def _later(self, identity: bytes, frame_id: bytes, coro: Coroutine[Any, Any, msgspec.Struct]) -> None:
        async def answer() -> None:
            try:
                self._answers.reply(identity, frame_id, await coro)
            except EnvServerError as error:
                self._answers.error(identity, frame_id, error.kind, str(error))

        self._owner.start(answer(), "answer")

    # -- the clock

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._runs.tend(now)
            self._answers.tend({wire.routing_id(h.run_id, h.attempt, h.source) for h in self.leases.holders})
            for holder in self.leases.expire(now, self.lease_s):
                log.warning("%s has been silent for %g s and loses its lease", holder, self.lease_s)
                self._runs.drop(holder.key, "cancelled", "the lease was lost")

    def _on_disconnect(self, _: list[bytes]) -> None:
        self.counts.disconnected += 1


def _version_of(body: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(body).get("version")
    except (msgspec.DecodeError, AttributeError):
        return None


def _version_mismatch(version: Any) -> EnvServerError:
    return EnvServerError(
        "refused",
        f"protocol version {version} of the client is not {wire.PROTOCOL_VERSION} of the env server; "
        "use the same moorage on both sides",
    )


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("moorage", "verifiers")}
