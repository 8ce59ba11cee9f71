"""Delivery: who owns an episode at each moment, from the request to the acknowledgement. Pure.

Each request is in one of four states, and every event moves it by the rules of docs/protocols.md section 1:

    queued -> running -> replied -> (owned by the client)
       \\         \\          \\-> discarded: cancel, lost lease, take-over, bye, shutdown
        \\         \\-> aborting -> discarded, once no worker can write to its folder any more
         \\-> answered with an error; nothing was kept

Promises:
- a request gets exactly one answer: `Send` (its reply) or `Answer` (an error);
- `Discard` is asked for at most once for a request, never while a worker may still keep something for it, and
  never after `owned`;
- whatever was kept and not acknowledged is discarded by the end of every path.

It does not know sockets, clocks or files: events come in, instructions go out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

OWNED_MEMORY = 100_000
"""So many acknowledged ids are remembered, so that a repeated ack is answered as the first was."""


class State(Enum):
    """Where a request is."""

    QUEUED = auto()
    RUNNING = auto()
    REPLIED = auto()
    ABORTING = auto()


@dataclass(frozen=True, slots=True)
class Send:
    """Send the reply of this request."""

    id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer this request with an error."""

    id: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the worker to end this run. `finished`, `failed` or the worker's death follows."""

    id: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete what was kept for this request."""

    id: str


Instruction = Send | Answer | Abort | Discard


@dataclass(slots=True)
class Entry:
    """One request. `may_hold`: something may lie in its folder."""

    holder: str
    state: State = State.QUEUED
    may_hold: bool = False


class Delivery:
    """The table of all requests that are not over."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._owned: OrderedDict[str, str] = OrderedDict()

    # -- what can be asked

    def knows(self, request_id: str, holder: str) -> bool:
        """Whether this request of this holder still has, or had, an owner that the holder may ask for."""
        entry = self.entries.get(request_id)
        if entry is not None:
            return entry.holder == holder and entry.state is not State.ABORTING
        return self._owned.get(request_id) == holder

    def state(self, request_id: str) -> State | None:
        """The state of a request that is not over, else None."""
        entry = self.entries.get(request_id)
        return None if entry is None else entry.state

    def count(self, state: State) -> int:
        """How many requests are in `state`."""
        return sum(entry.state is state for entry in self.entries.values())

    # -- events

    def admit(self, request_id: str, holder: str) -> bool:
        """A request came in. False when its id is taken, which answers it with an error."""
        if request_id in self.entries or request_id in self._owned:
            return False
        self.entries[request_id] = Entry(holder)
        return True

    def dispatched(self, request_id: str) -> None:
        """The request was given to a worker."""
        entry = self.entries[request_id]
        entry.state = State.RUNNING
        entry.may_hold = True

    def finished(self, request_id: str, kept: bool) -> list[Instruction]:
        """The worker ended the run with a reply, having kept something or nothing."""
        entry = self.entries.get(request_id)
        if entry is None:
            return []
        entry.may_hold = kept
        if entry.state is State.ABORTING:
            return self._forget(request_id, entry)
        entry.state = State.REPLIED
        return [Send(request_id)]

    def failed(self, request_id: str, kept: bool, kind: str, message: str) -> list[Instruction]:
        """The worker ended the run with an error (an aborted run, too, ends so)."""
        entry = self.entries.get(request_id)
        if entry is None:
            return []
        entry.may_hold = kept
        if entry.state is State.ABORTING:
            return self._forget(request_id, entry)
        return [Answer(request_id, kind, message), *self._forget(request_id, entry)]

    def worker_died(self, request_id: str, message: str) -> list[Instruction]:
        """The worker that had this request is gone, whatever it was doing."""
        entry = self.entries.get(request_id)
        if entry is None or entry.state not in (State.RUNNING, State.ABORTING):
            return []
        answer = [Answer(request_id, "worker_died", message)] if entry.state is State.RUNNING else []
        return [*answer, *self._forget(request_id, entry)]

    def expired(self, request_id: str, message: str) -> list[Instruction]:
        """The request's deadline has passed."""
        return self._end(request_id, "deadline", message)

    def ack(self, request_ids: Iterable[str], holder: str) -> tuple[list[str], list[str]]:
        """The client takes over: (owned, unknown)."""
        owned, unknown = [], []
        for request_id in request_ids:
            entry = self.entries.get(request_id)
            if entry is not None and entry.holder == holder and entry.state is State.REPLIED:
                del self.entries[request_id]
                self._remember(request_id, holder)
                owned.append(request_id)
            elif entry is None and self._owned.get(request_id) == holder:
                owned.append(request_id)
            else:
                unknown.append(request_id)
        return owned, unknown

    def cancel(self, request_ids: Iterable[str], holder: str) -> tuple[list[str], list[Instruction]]:
        """The client wants none of these: (which were live, instructions)."""
        live: list[str] = []
        instructions: list[Instruction] = []
        for request_id in request_ids:
            entry = self.entries.get(request_id)
            if entry is None or entry.holder != holder or entry.state is State.ABORTING:
                continue
            live.append(request_id)
            instructions += self._end(request_id, "cancelled", "cancelled by the client")
        return live, instructions

    def drop(self, holder: str, kind: str, message: str) -> list[Instruction]:
        """The holder is gone (lost lease, take-over, bye, shutdown): end all it has not acknowledged."""
        instructions: list[Instruction] = []
        for request_id in [i for i, entry in self.entries.items() if entry.holder == holder]:
            instructions += self._end(request_id, kind, message)
        return instructions

    def forget_owned(self) -> None:
        """Nothing that was acknowledged so far will be asked for again."""
        self._owned.clear()

    # -- rules

    def _end(self, request_id: str, kind: str, message: str) -> list[Instruction]:
        entry = self.entries.get(request_id)
        if entry is None or entry.state is State.ABORTING:
            return []
        if entry.state is State.REPLIED:
            return self._forget(request_id, entry)
        answer = Answer(request_id, kind, message)
        if entry.state is State.QUEUED:
            return [answer, *self._forget(request_id, entry)]
        entry.state = State.ABORTING
        return [answer, Abort(request_id)]

    def _forget(self, request_id: str, entry: Entry) -> list[Instruction]:
        del self.entries[request_id]
        return [Discard(request_id)] if entry.may_hold else []

    def _remember(self, request_id: str, holder: str) -> None:
        self._owned[request_id] = holder
        if len(self._owned) > OWNED_MEMORY:
            self._owned.popitem(last=False)
