"""What a journal adds up to: who holds what, who freed it, what went wrong. Pure; time comes with the events.

`Account.apply` takes one event after the other. Whatever the order in which processes wrote them:

- kept = freed by holders + outstanding, always; a blob is freed at most once;
- the first holder that frees a blob is the one that is counted. The same holder again counts nothing, another
  holder counts as a double free, an id that was never kept counts as unknown;
- a request that was discarded keeps nothing any more: its reservations are void, and so are later ones;
- a reservation counts against the budget (`held_bytes`) from its line on, and as kept only when completed;
- what it counts there is its `footprint`: the room of the file that it may come to lie in.

A process that only needs to know what is there (a worker, a mapping reader) remembers no freed ids
(`remember=0`). The service remembers the last `remember` of them; an older repeat is counted as unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from moorage.payload.journal import Event
from moorage.records.payload import HOLDERS, Ledger

REMEMBERED = 1_000_000
_REMEMBERED_DISCARDS = 100_000
RECYCLED_FROM = 1 << 20
"""Blobs of so many bytes may lie in files that were another blob's before, and that are longer than they."""


def footprint(nbytes: int) -> int:
    """Room that a blob takes up at most: large ones are rounded up by less than an eighth, in steps."""
    if nbytes < RECYCLED_FROM:
        return nbytes
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


@dataclass(slots=True)
class Entry:
    """A blob that takes up room. `since`: seconds since the epoch. `complete`: kept, not only reserved."""

    id: str
    request: str
    nbytes: int
    since: float
    complete: bool = False


@dataclass(slots=True)
class Outcome:
    """What one event did: blobs it freed, and how many of its ids were repeats, double frees or unknown."""

    freed: list[Entry] = field(default_factory=list)
    repeated: int = 0
    double: int = 0
    unknown: int = 0


class Account:
    """The fold of one journal."""

    def __init__(self, remember: int = REMEMBERED) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests: dict[str, dict[str, Entry]] = {}
        self.discarded: OrderedDict[str, str] = OrderedDict()
        self.held_bytes = 0
        self.peak_bytes = 0
        self.ended = False
        self._remember = remember
        self._freed: OrderedDict[bytes, int] = OrderedDict()
        self._counts = Ledger()

    def apply(self, event: Event) -> Outcome:
        """Take one event; unknown kinds are ignored (a newer writer)."""
        handler = getattr(self, f"_on_{event.kind}", None)
        return handler(*event.fields) if handler else Outcome()

    def _on_R(self, time: str, blob_id: str, request: str, nbytes: str) -> Outcome:
        if blob_id not in self.entries and request not in self.discarded:
            entry = Entry(blob_id, request, int(nbytes), float(time))
            self.entries[blob_id] = self.requests.setdefault(request, {})[blob_id] = entry
            self.held_bytes += footprint(entry.nbytes)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Outcome()

    def _on_K(self, blob_id: str) -> Outcome:
        entry = self.entries.get(blob_id)
        if entry is None or entry.complete:
            return Outcome()
        entry.complete = True
        self._counts.kept += 1
        self._counts.kept_bytes += entry.nbytes
        self._counts.outstanding_bytes += entry.nbytes
        return Outcome()

    def _on_X(self, blob_id: str) -> Outcome:
        entry = self.entries.get(blob_id)
        if entry is not None and not entry.complete:
            self._forget(entry)
        return Outcome()

    def _on_F(self, _time: str, holder: str, *blob_ids: str) -> Outcome:
        outcome = Outcome()
        for blob_id in blob_ids:
            entry = self.entries.get(blob_id)
            if entry is not None and entry.complete:
                outcome.freed.append(self._free(entry, holder))
            elif (earlier := self._freed.get(_key(blob_id))) is None:
                outcome.unknown += 1
            elif earlier == _holder_index(holder):
                outcome.repeated += 1
            else:
                outcome.double += 1
        self._counts.unknown += outcome.unknown
        self._counts.double_frees += outcome.double
        return outcome

    def _on_D(self, _time: str, holder: str, request: str) -> Outcome:
        self.discarded[request] = holder
        if len(self.discarded) > _REMEMBERED_DISCARDS:
            self.discarded.popitem(last=False)
        outcome = Outcome()
        for entry in list(self.requests.get(request, {}).values()):
            if entry.complete:
                outcome.freed.append(self._free(entry, holder))
            else:
                self._forget(entry)
        return outcome

    def _on_M(self, _blob_id: str) -> Outcome:
        self._counts.damaged += 1
        return Outcome()

    def _on_E(self, _time: str) -> Outcome:
        self.ended = True
        return Outcome()

    def _free(self, entry: Entry, holder: str) -> Entry:
        self._forget(entry)
        self._counts.freed[holder] = self._counts.freed.get(holder, 0) + 1
        self._counts.outstanding_bytes -= entry.nbytes
        if self._remember:
            self._freed[_key(entry.id)] = _holder_index(holder)
            if len(self._freed) > self._remember:
                self._freed.popitem(last=False)
        return entry

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.id]
        siblings = self.requests[entry.request]
        del siblings[entry.id]
        if not siblings:
            del self.requests[entry.request]
        self.held_bytes -= footprint(entry.nbytes)

    def is_known(self, blob_id: str) -> bool:
        """Whether the blob was ever kept, as far back as freed ids are remembered."""
        entry = self.entries.get(blob_id)
        return (entry is not None and entry.complete) or _key(blob_id) in self._freed

    def kept(self) -> Iterator[Entry]:
        """Complete blobs that nobody has freed, oldest first."""
        return (entry for entry in self.entries.values() if entry.complete)

    def ledger(self, now: float) -> Ledger:
        """A copy of the counts; `oldest_s` is measured from `now`."""
        counts = Ledger(**{name: getattr(self._counts, name) for name in Ledger.__struct_fields__})
        counts.freed = {holder: self._counts.freed.get(holder, 0) for holder in HOLDERS}
        counts.peak_bytes = self.peak_bytes
        counts.outstanding = counts.kept - sum(self._counts.freed.values())
        oldest = next(self.kept(), None)
        counts.oldest_s = max(0.0, now - oldest.since) if oldest else 0.0
        return counts


def _key(blob_id: str) -> bytes:
    try:
        return bytes.fromhex(blob_id)
    except ValueError:
        return blob_id.encode()


def _holder_index(holder: str) -> int:
    return HOLDERS.index(holder) if holder in HOLDERS else -1
