"""The runs of a broker: admitted, queued, given to workers, answered.

Owns the table of open runs and their bodies. `Delivery` decides; this module gathers the facts (a worker's
word, a death, the clock) and carries out what it says. Promises: a run is answered by its deadline,
whatever its worker does; a cancel is answered when its runs have ended, at the latest after `CANCEL_S`; a
reply is kept until it is acknowledged or discarded. It does not know leases, tokens or sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire
from moorage.env.answers import Answers
from moorage.env.channel import Kind
from moorage.env.delivery import Abort, Answer, Delivery, Discard, Instruction, Send, State
from moorage.env.leases import Holder
from moorage.env.store import Store
from moorage.env.workers import Workers

DEADLINE_GRACE_S = 1.0
"""A worker answers for its own deadlines; so long after one the broker does."""
GONE_S = 30.0
"""A run that was ended and is still there after this takes its worker along."""
RESEND_S = 2.0
"""A reply that the client still asks for so long after it was sent is sent again."""
LATE = "the run did not end by its deadline (deadline_s)"


@dataclass
class Run:
    """A run that is not over. `identity` and `frame_id` say where its answer goes."""

    identity: bytes
    frame_id: bytes
    method: bytes
    cost: int
    body: bytes
    deadline: float


@dataclass
class CancelWait:
    """A cancel that is answered when its runs have ended, or at `until`."""

    identity: bytes
    frame_id: bytes
    live: tuple[str, ...]
    left: set[str]
    until: float


@dataclass
class _Timers:
    """What happens when: (time, request id, what)."""

    heap: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, when: float, request_id: str, what: str) -> None:
        heapq.heappush(self.heap, (when, request_id, what))

    def due(self, now: float) -> list[tuple[str, str]]:
        out = []
        while self.heap and self.heap[0][0] <= now:
            _, request_id, what = heapq.heappop(self.heap)
            out.append((request_id, what))
        return out


class Runs:
    """All runs that are not over."""

    def __init__(self, answers: Answers, store: Store, workers: Workers) -> None:
        self.delivery = Delivery()
        self._answers = answers
        self._store = store
        self._workers = workers
        self._runs: dict[str, Run] = {}
        self._queue: deque[str] = deque()
        self._replies: dict[str, tuple[float, bytes]] = {}
        self._cancels: list[CancelWait] = []
        self._timers = _Timers()
        self._someone_over = asyncio.Event()

    def __len__(self) -> int:
        return len(self.delivery.entries)

    def describe(self) -> str:
        """How many requests are in which state."""
        counts = {state.name.lower(): self.delivery.count(state) for state in State}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    # -- requests

    def admit(
        self,
        identity: bytes,
        frame_id: bytes,
        method: bytes,
        body: bytes,
        holder: Holder,
        request: wire.RunRollout,
    ) -> None:
        """Take a run in. Raises EnvServerError when it cannot be run."""
        cost = request.n if isinstance(request, wire.RunGroup) else 1
        if cost < 1 or not 0 < request.deadline_s < 1e8:
            raise EnvServerError(
                "bad_request", f"n = {cost} and deadline_s = {request.deadline_s} must both be above 0"
            )
        request_id = frame_id.decode()
        if not self.delivery.admit(request_id, holder.key):
            raise EnvServerError("bad_request", f"request id {request_id!r} is taken")
        deadline = time.monotonic() + request.deadline_s
        self._runs[request_id] = Run(identity, frame_id, method, cost, body, deadline)
        self._timers.add(deadline, request_id, "deadline")
        self._queue.append(request_id)
        self.pump()

    def ack(self, identity: bytes, frame_id: bytes, holder: Holder, request: wire.Ack) -> None:
        """The client takes episodes over."""
        owned, unknown = self.delivery.ack(request.ids, holder.key)
        for request_id in owned:
            self._forget(request_id)
        self._answers.reply(identity, frame_id, wire.AckReply(owned=tuple(owned), unknown=tuple(unknown)))

    def cancel(self, identity: bytes, frame_id: bytes, holder: Holder, request: wire.Cancel) -> None:
        """The client wants none of these; answered when they have ended."""
        live, instructions = self.delivery.cancel(request.ids, holder.key)
        left = {i for i in request.ids if self.delivery.state(i) is State.ABORTING}
        until = time.monotonic() + wire.CANCEL_S
        self._cancels.append(CancelWait(identity, frame_id, tuple(live), left, until))
        self._carry_out(instructions)
        self.answer_cancels(time.monotonic())

    def drop(self, holder_key: str, kind: str, message: str) -> None:
        """The holder is gone: end what it has not acknowledged."""
        self._carry_out(self.delivery.drop(holder_key, kind, message))

    def drop_all(self, kind: str, message: str) -> set[str]:
        """Every holder is gone. Returns the keys of those whose requests were not over."""
        holders = {entry.holder for entry in self.delivery.entries.values()}
        for holder_key in holders:
            self.drop(holder_key, kind, message)
        return holders

    async def wait_over(self, holder_keys: Collection[str] | None, timeout_s: float) -> None:
        """Until no request of these holders (None: of anybody) is open, at most `timeout_s`."""
        entries = self.delivery.entries
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(holder_keys is None or e.holder in holder_keys for e in entries.values()):
                    self._someone_over.clear()
                    await self._someone_over.wait()

    def settle(self, identity: bytes, holder: Holder, request_ids: Collection[str]) -> list[str]:
        """Send again what a client still waits for; the ids that are unknown here."""
        unknown = []
        for request_id in request_ids:
            if self.delivery.knows(request_id, holder.key):
                self._resend(request_id)
            elif not self._answers.repeat(identity, request_id.encode()):
                unknown.append(request_id)
        return unknown

    def _resend(self, request_id: str) -> None:
        sent, body = self._replies.get(request_id, (0.0, b""))
        if body and time.monotonic() - sent > RESEND_S:
            run = self._runs[request_id]
            self._replies[request_id] = (time.monotonic(), body)
            self._answers.send(run.identity, run.frame_id, wire.REPLY, body)

    # -- what workers and the clock say

    def pump(self) -> None:
        """Give queued runs to workers, first come first served."""
        while self._queue:
            request_id = self._queue[0]
            if self.delivery.state(request_id) is not State.QUEUED:
                self._queue.popleft()
                continue
            run = self._runs[request_id]
            worker = self._workers.choose(run.cost)
            if worker is None:
                return
            self._queue.popleft()
            self.delivery.dispatched(request_id)
            left_s = max(0.001, run.deadline - time.monotonic())
            kind = Kind.GROUP if run.method == b"run_group" else Kind.RUN
            self._workers.give(worker, kind, request_id, run.cost, left_s, run.body)
            run.body = b""

    def on_ended(self, request_id: str, kind: int, kept: int, body: bytes) -> None:
        """A worker has ended a run and will write nothing more for it."""
        if kind == Kind.DONE:
            self._carry_out(self.delivery.finished(request_id, kept > 0), body)
        else:
            error = wire.decode_error(body)
            self._carry_out(self.delivery.failed(request_id, kept > 0, error.kind, str(error)))
        self._ended(request_id)
        self.pump()

    def on_death(self, request_ids: list[str], message: str) -> None:
        """A worker has died with these runs."""
        for request_id in request_ids:
            self._carry_out(self.delivery.worker_died(request_id, message))
            self._ended(request_id)

    def tend(self, now: float) -> None:
        """Deadlines and late cancels."""
        for request_id, what in self._timers.due(now):
            self._on_timer(request_id, what)
        self.answer_cancels(now)

    def _on_timer(self, request_id: str, what: str) -> None:
        state = self.delivery.state(request_id)
        if what == "gone":
            if state is State.ABORTING:
                self._workers.kill(
                    request_id, f"run {request_id} did not end {GONE_S:g} s after it was ended"
                )
        elif state is State.QUEUED:
            self._carry_out(self.delivery.expired(request_id, f"{LATE}: it was still queued"))
        elif state is State.RUNNING and what == "deadline":
            self._timers.add(time.monotonic() + DEADLINE_GRACE_S, request_id, "grace")
        elif state is State.RUNNING:
            stuck = self._workers.is_stuck(request_id)
            self._carry_out(self.delivery.expired(request_id, LATE))
            if stuck:
                self._workers.kill(request_id, f"stuck, with run {request_id} past its deadline")

    # -- carrying out

    def _carry_out(self, instructions: list[Instruction], body: bytes = b"") -> None:
        for instruction in instructions:
            match instruction:
                case Send(request_id):
                    run = self._runs[request_id]
                    self._replies[request_id] = (time.monotonic(), body)
                    self._answers.send(run.identity, run.frame_id, wire.REPLY, body)
                case Answer(request_id, kind, message):
                    run = self._runs[request_id]
                    answer = wire.encode_error(kind, message)
                    self._answers.remember(run.identity, run.frame_id, wire.ERROR, answer)
                case Abort(request_id):
                    self._timers.add(time.monotonic() + GONE_S, request_id, "gone")
                    self._workers.cancel(request_id)
                case Discard(request_id):
                    self._store.discard(request_id)
        for instruction in instructions:
            if self.delivery.state(instruction.id) is None:
                self._forget(instruction.id)

    def _forget(self, request_id: str) -> None:
        self._runs.pop(request_id, None)
        self._replies.pop(request_id, None)
        self._someone_over.set()

    def _ended(self, request_id: str) -> None:
        self._forget_if_over(request_id)
        if self._cancels:
            for wait in self._cancels:
                wait.left.discard(request_id)
            self.answer_cancels(time.monotonic())

    def _forget_if_over(self, request_id: str) -> None:
        if self.delivery.state(request_id) is None:
            self._forget(request_id)

    def answer_cancels(self, now: float = float("inf")) -> None:
        """Answer the cancels whose runs have ended, or whose time is up at `now`."""
        if not self._cancels:
            return
        waiting, self._cancels = self._cancels, []
        for wait in waiting:
            if wait.left and now < wait.until:
                self._cancels.append(wait)
            else:
                self._answers.reply(wait.identity, wait.frame_id, wire.CancelReply(live=wait.live))
