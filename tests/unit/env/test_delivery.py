"""The delivery contract as a state machine: server, worker, spool, client, and a wire that loses things.

Whatever the order of events, every kept payload is owned by exactly one side at each moment and freed exactly
once at the end (docs/protocols.md section 1; R5).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moorage.core.errors import EnvServerError
from moorage.env.delivery import Abort, Answer, Delivery, Discard, Send, State
from moorage.env.leases import Holder, Leases
from moorage.env.protocol import LEASE_S

OPEN, ACKING, CANCELLED, OWNED, FAILED = "open", "acking", "cancelled", "owned", "failed"


@dataclass
class Blob:
    request: str
    owner: str = "server"
    frees: int = 0


@dataclass
class Spool:
    """Blobs in folders named after their requests."""

    blobs: list[Blob] = field(default_factory=list)
    discarded: set[str] = field(default_factory=set)

    def keep(self, request: str) -> bool:
        if request in self.discarded:
            return False
        self.blobs.append(Blob(request))
        return True

    def has(self, request: str) -> bool:
        return any(b.request == request and b.owner == "server" for b in self.blobs)

    def discard(self, request: str) -> None:
        assert request not in self.discarded, f"{request} is discarded twice"
        self.discarded.add(request)
        for blob in self.blobs:
            if blob.request == request:
                assert blob.owner == "server", f"{request} belongs to the {blob.owner} and is discarded"
                self.free(blob)

    def give_away(self, request: str) -> None:
        for blob in self.blobs:
            if blob.request == request:
                assert blob.owner == "server"
                blob.owner = "client"

    def release(self, request: str) -> None:
        for blob in self.blobs:
            if blob.request == request and blob.owner == "client":
                self.free(blob)

    def free_rest(self, retain: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        for blob in self.blobs:
            if blob.owner != "nobody" and blob.request not in retain:
                self.free(blob)

    def free(self, blob: Blob) -> None:
        blob.frees += 1
        blob.owner = "nobody"


@dataclass
class Client:
    """One attempt's client, by docs/protocols.md: one of ack or cancel, and the first decides."""

    holder: Holder
    runs: dict[str, str] = field(default_factory=dict)
    sent: dict[str, list[str]] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class DeliveryMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.number = 0
        self.attempt = 1
        self.spool = Spool()
        self.clients: list[Client] = []
        self.start_server()
        self.start_client()

    def start_server(self) -> None:
        self.delivery = Delivery()
        self.leases = Leases("run", self.attempt)
        self.answered: dict[str, int] = {}
        self.errors: set[str] = set()
        self.worker: set[str] = set()

    def start_client(self) -> Holder | None:
        """A new attempt says hello; who was served before it."""
        self.client = Client(Holder("run", self.attempt, "train/a"))
        self.clients.append(self.client)
        self.to_server: deque = deque()
        self.to_client: deque = deque()
        return self.leases.hello(self.client.holder, 0.0)

    # -- the server's shell

    def carry_out(self, instructions: list) -> None:
        for instruction in instructions:
            match instruction:
                case Send(request):
                    self.answered[request] = self.answered.get(request, 0) + 1
                    self.to_client.append(("reply", request))
                case Answer(request, _, _):
                    self.answered[request] = self.answered.get(request, 0) + 1
                    self.errors.add(request)
                    self.to_client.append(("error", request))
                case Abort(request):
                    assert request in self.worker
                case Discard(request):
                    assert request not in self.worker, f"{request} is discarded while a worker may write"
                    self.spool.discard(request)

    def serve(self, message: tuple) -> None:
        kind, holder, ids = message
        try:
            self.leases.check(holder, 0.0)
        except EnvServerError:
            if kind == "run":
                self.answered[ids[0]] = 1
            self.to_client.append(("refused", holder))
            return
        if kind == "run":
            assert self.delivery.admit(ids[0], holder.key)
        elif kind == "ack":
            new = [i for i in ids if self.delivery.state(i) is State.REPLIED]
            owned, unknown = self.delivery.ack(ids, holder.key)
            for request in new:
                self.spool.give_away(request)
            self.to_client.append(("acked", owned, unknown))
        elif kind == "cancel":
            _, instructions = self.delivery.cancel(ids, holder.key)
            self.carry_out(instructions)
        elif kind == "ping":
            unknown = []
            for request in ids:
                if self.delivery.knows(request, holder.key):
                    if self.delivery.state(request) is State.REPLIED:
                        self.to_client.append(("reply", request))
                elif request in self.errors:
                    self.to_client.append(("error", request))
                else:
                    unknown.append(request)
            self.to_client.append(("unknown", unknown))

    # -- the client's rules

    def send(self, kind: str, ids: list[str]) -> None:
        for request in ids:
            if kind in ("ack", "cancel"):
                other = "cancel" if kind == "ack" else "ack"
                assert other not in self.client.sent.get(request, []), f"{kind} after {other} for {request}"
                self.client.sent.setdefault(request, []).append(kind)
        self.to_server.append((kind, self.client.holder, ids))

    def hear(self, message: tuple) -> None:
        runs = self.client.runs
        if message[0] == "reply":
            request = message[1]
            if runs.get(request) == OPEN:
                runs[request] = ACKING
                self.send("ack", [request])
            elif runs.get(request) == ACKING:
                self.send("ack", [request])
            elif runs.get(request) == FAILED and "ack" not in self.client.sent.get(request, []):
                self.send("cancel", [request])
        elif message[0] == "error":
            if runs.get(message[1]) == OPEN:
                runs[message[1]] = FAILED
        elif message[0] == "acked":
            for request in message[1]:
                if runs.get(request) == ACKING:
                    runs[request] = OWNED
            for request in message[2]:
                if runs.get(request) == ACKING:
                    runs[request] = FAILED
        elif message[0] == "unknown":
            for request in message[1]:
                if runs.get(request) in (OPEN, ACKING):
                    runs[request] = FAILED
        elif message[0] == "refused" and message[1] == self.client.holder:
            for request, state in runs.items():
                if state in (OPEN, ACKING):
                    runs[request] = FAILED
            if self.client.holder.attempt == self.attempt:
                self.leases.hello(self.client.holder, 0.0)

    # -- what can happen

    def pick(self, data, states: tuple[str, ...]) -> str | None:
        found = [request for request, state in self.client.runs.items() if state in states]
        return data.draw(st.sampled_from(found)) if found else None

    def pick_working(self, data) -> str | None:
        return data.draw(st.sampled_from(sorted(self.worker))) if self.worker else None

    @rule()
    def ask_for_a_run(self) -> None:
        self.number += 1
        request = f"r{self.number}"
        self.client.runs[request] = OPEN
        self.send("run", [request])

    @rule(keeps=st.booleans())
    def a_run_starts(self, keeps: bool) -> None:
        """Asked, read, dispatched, and perhaps something kept already: what most histories go through."""
        self.ask_for_a_run()
        while self.to_server:
            self.serve(self.to_server.popleft())
        while any(e.state is State.QUEUED for e in self.delivery.entries.values()):
            self.dispatch()
        if keeps and f"r{self.number}" in self.worker:
            self.spool.keep(f"r{self.number}")

    @rule()
    def server_reads_one(self) -> None:
        if self.to_server:
            self.serve(self.to_server.popleft())

    @rule()
    def client_reads_one(self) -> None:
        if self.to_client:
            self.hear(self.to_client.popleft())

    @rule()
    def dispatch(self) -> None:
        for request, entry in self.delivery.entries.items():
            if entry.state is State.QUEUED:
                self.delivery.dispatched(request)
                self.worker.add(request)
                return

    @rule(data=st.data())
    def worker_keeps(self, data) -> None:
        request = self.pick_working(data)
        if request is not None:
            self.spool.keep(request)

    @rule(data=st.data())
    def worker_finishes(self, data) -> None:
        request = self.pick_working(data)
        if request is not None:
            self.worker.discard(request)
            self.carry_out(self.delivery.finished(request, self.spool.has(request)))

    @rule(data=st.data())
    def worker_fails_to_encode_or_raises(self, data) -> None:
        request = self.pick_working(data)
        if request is not None:
            self.worker.discard(request)
            self.carry_out(self.delivery.failed(request, self.spool.has(request), "task_error", "no"))

    @rule()
    def worker_dies(self) -> None:
        runs, self.worker = self.worker, set()
        for request in sorted(runs):
            self.carry_out(self.delivery.worker_died(request, "killed"))

    @rule(data=st.data())
    def deadline_passes(self, data) -> None:
        if self.delivery.entries:
            request = data.draw(st.sampled_from(sorted(self.delivery.entries)))
            if self.delivery.state(request) in (State.QUEUED, State.RUNNING):
                self.carry_out(self.delivery.expired(request, "late"))

    @rule(data=st.data())
    def client_cancels(self, data) -> None:
        request = self.pick(data, (OPEN,))
        if request is not None:
            self.client.runs[request] = CANCELLED
            self.send("cancel", [request])

    @rule(data=st.data())
    def client_releases(self, data) -> None:
        request = self.pick(data, (OWNED,))
        if request is not None and request not in self.client.released:
            self.client.released.add(request)
            self.spool.release(request)

    @rule()
    def client_pings(self) -> None:
        runs = self.client.runs
        self.send("ping", [r for r, state in runs.items() if state in (OPEN, ACKING)])
        acking = [r for r, state in runs.items() if state == ACKING]
        if acking:
            self.send("ack", acking)

    @rule(to_server=st.booleans(), to_client=st.booleans())
    def connection_is_cut(self, to_server: bool, to_client: bool) -> None:
        if to_server:
            self.to_server.clear()
        if to_client:
            self.to_client.clear()

    @rule()
    def lease_is_lost(self) -> None:
        for holder in self.leases.expire(LEASE_S):
            self.carry_out(self.delivery.drop(holder.key, "cancelled", "silent"))

    @precondition(lambda self: self.attempt < 4)
    @rule(adopt_all=st.booleans())
    def next_attempt_takes_over(self, adopt_all: bool) -> None:
        """The old client is gone, its lease perhaps too; what its batches name is adopted or not."""
        adopted = {r for r, s in self.client.runs.items() if s == OWNED} if adopt_all else set()
        adopted -= self.client.released
        self.attempt += 1
        old = self.client.holder
        assert self.start_client() == old
        self.carry_out(self.delivery.drop(old.key, "cancelled", "taken over"))
        self.to_client.clear()  # answers to the old attempt: nobody is there
        self.delivery.forget_owned()
        self.discard_old(adopted)

    def discard_old(self, adopted: set[str]) -> None:
        for blob in self.spool.blobs:
            if blob.owner == "client" and blob.request not in adopted:
                self.spool.free(blob)
        for request in adopted:
            self.client.runs[request] = OWNED

    @precondition(lambda self: self.attempt < 4)
    @rule()
    def server_dies(self) -> None:
        """Everything it knew is gone; the next server removes the spool of the dead one."""
        self.attempt += 1
        self.start_server()
        self.start_client()
        self.spool.free_rest()

    @invariant()
    def nothing_is_freed_twice(self) -> None:
        assert all(blob.frees <= 1 for blob in self.spool.blobs)
        assert all((blob.owner == "nobody") == (blob.frees == 1) for blob in self.spool.blobs)

    @invariant()
    def every_request_has_at_most_one_answer(self) -> None:
        assert all(count == 1 for count in self.answered.values())

    @invariant()
    def what_the_client_owns_the_server_does_not(self) -> None:
        for request, state in self.client.runs.items():
            if state == OWNED and request not in self.client.released:
                assert all(b.owner == "client" for b in self.spool.blobs if b.request == request)

    def teardown(self) -> None:
        """Let everything come to rest, say bye, and count."""
        if not hasattr(self, "delivery"):
            return
        self.dispatch()
        for _ in range(4):
            self.client_pings()
            while self.to_server or self.to_client:
                self.server_reads_one()
                self.client_reads_one()
            while any(e.state is State.QUEUED for e in self.delivery.entries.values()):
                self.dispatch()
            for request in sorted(self.worker):
                self.worker.discard(request)
                self.carry_out(self.delivery.finished(request, self.spool.has(request)))
        assert all(state not in (OPEN, ACKING) for state in self.client.runs.values())
        for request, state in self.client.runs.items():
            if state == OWNED and request not in self.client.released:
                self.spool.release(request)
        self.carry_out(self.delivery.drop(self.client.holder.key, "cancelled", "bye"))
        for request in list(self.delivery.entries):
            if request in self.worker:
                self.worker.discard(request)
            self.carry_out(self.delivery.failed(request, self.spool.has(request), "cancelled", "bye"))
        assert not self.delivery.entries
        assert all(blob.owner != "server" for blob in self.spool.blobs), "kept, never acknowledged, not freed"
        self.spool.free_rest()
        assert all(blob.frees == 1 for blob in self.spool.blobs)


DeliveryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestDeliveryMachine = DeliveryMachine.TestCase


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_the_contract_holds_over_many_more_histories() -> None:
    run_state_machine_as_test(
        DeliveryMachine, settings=settings(max_examples=3000, stateful_step_count=60, deadline=None)
    )


def replied(kept: bool = True) -> Delivery:
    delivery = Delivery()
    assert delivery.admit("r", "me")
    delivery.dispatched("r")
    assert delivery.finished("r", kept) == [Send("r")]
    return delivery


def test_an_ack_may_be_repeated() -> None:
    delivery = replied()
    assert delivery.ack(["r"], "me") == (["r"], [])
    assert delivery.ack(["r"], "me") == (["r"], [])


def test_nobody_else_can_take_or_cancel_an_episode() -> None:
    delivery = replied()
    assert delivery.ack(["r"], "other") == ([], ["r"])
    assert delivery.cancel(["r"], "other") == ([], [])


def test_a_cancel_after_the_reply_discards() -> None:
    assert replied().cancel(["r"], "me") == (["r"], [Discard("r")])


def test_a_cancel_after_the_ack_changes_nothing() -> None:
    delivery = replied()
    delivery.ack(["r"], "me")
    assert delivery.cancel(["r"], "me") == ([], [])


def test_nothing_is_discarded_for_an_episode_that_kept_nothing() -> None:
    assert replied(kept=False).cancel(["r"], "me") == (["r"], [])


def test_a_running_cancel_waits_for_the_worker_before_it_discards() -> None:
    delivery = Delivery()
    delivery.admit("r", "me")
    delivery.dispatched("r")
    live, instructions = delivery.cancel(["r"], "me")
    assert live == ["r"]
    assert [type(i) for i in instructions] == [Answer, Abort]
    assert delivery.cancel(["r"], "me") == ([], [])
    assert delivery.finished("r", True) == [Discard("r")]


def test_an_id_cannot_be_used_again() -> None:
    delivery = replied()
    assert not delivery.admit("r", "me")
    delivery.ack(["r"], "me")
    assert not delivery.admit("r", "me")
