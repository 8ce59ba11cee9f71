"""Who holds a payload inside one process: the pure bookkeeping of requirement R5.

An entry comes in once (`hold`) and leaves exactly once: by `hand_over` (somebody else frees it from now on)
or by `release` (the caller frees it now). Everything else is a bug of ours and raises `CustodyError`: holding
twice, leaving twice, leaving without having come. At the end of a process `release_all` says what is still
held, to be freed and listed. Invariant: held = handed over + released + outstanding.

Does not know: stores, HTTP, time (it is given).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moorage.records.payload import PayloadRef, PayloadSlice


class CustodyError(RuntimeError):
    """Our own bookkeeping is broken; the message names the blob and both sides."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One held payload. `key`: what it belongs to (an episode or trace id). `since`: as given to `hold`."""

    ref: PayloadRef | PayloadSlice
    key: str
    since: float


class Custody:
    """What `holder` holds and therefore owes."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.num_held = 0
        self.num_released = 0
        self.num_handed_over: dict[str, int] = {}
        self._holdings: dict[str, Holding] = {}
        self._by_key: dict[str, dict[str, None]] = {}

    def hold(self, key: str, refs: Iterable[PayloadRef | PayloadSlice], now: float = 0.0) -> None:
        """Take custody of `refs`, which belong to `key`. Raises CustodyError before anything is taken."""
        refs = list(refs)
        for ref in refs:
            if (held := self._holdings.get(ref.id)) is not None:
                raise CustodyError(
                    f"{self.holder} already holds payload {ref.id} (of {held.key!r}, now {key!r})"
                )
        if len({ref.id for ref in refs}) != len(refs):
            raise CustodyError(f"{self.holder} is to hold a payload of {key!r} twice")
        for ref in refs:
            self._holdings[ref.id] = Holding(ref, key, now)
            self._by_key.setdefault(key, {})[ref.id] = None
        self.num_held += len(refs)

    def ids(self, key: str) -> tuple[str, ...]:
        """Ids that are held for `key`, in the order they came."""
        return tuple(self._by_key.get(key, ()))

    def hand_over(self, ids: Iterable[str], to: str) -> tuple[PayloadRef | PayloadSlice, ...]:
        """Give up custody to `to`, which frees them from now on. Raises before anything leaves."""
        refs = self._leave(ids, f"hand over to {to}")
        self.num_handed_over[to] = self.num_handed_over.get(to, 0) + len(refs)
        return refs

    def release(self, ids: Iterable[str]) -> tuple[PayloadRef | PayloadSlice, ...]:
        """Give up custody in order to free now; what is to be freed. Raises before anything leaves."""
        refs = self._leave(ids, "release")
        self.num_released += len(refs)
        return refs

    def release_key(self, key: str) -> tuple[PayloadRef | PayloadSlice, ...]:
        """Release all that is held for `key`; nothing when there is nothing."""
        return self.release(self.ids(key))

    def hand_over_key(self, key: str, to: str) -> tuple[PayloadRef | PayloadSlice, ...]:
        """Hand over all that is held for `key`."""
        return self.hand_over(self.ids(key), to)

    def release_all(self) -> tuple[PayloadRef | PayloadSlice, ...]:
        """Release everything: what a process does last."""
        return self.release(tuple(self._holdings))

    @property
    def outstanding(self) -> tuple[Holding, ...]:
        """What is held, oldest first."""
        return tuple(self._holdings.values())

    def __len__(self) -> int:
        return len(self._holdings)

    def __contains__(self, blob_id: str) -> bool:
        return blob_id in self._holdings

    def _leave(self, ids: Iterable[str], what: str) -> tuple[PayloadRef | PayloadSlice, ...]:
        ids = list(ids)
        missing = [blob_id for blob_id in ids if blob_id not in self._holdings]
        if missing or len(set(ids)) != len(ids):
            named = missing[0] if missing else ids[0]
            raise CustodyError(f"{self.holder} cannot {what} payload {named}: it does not hold it (any more)")
        refs = []
        for blob_id in ids:
            holding = self._holdings.pop(blob_id)
            siblings = self._by_key[holding.key]
            del siblings[blob_id]
            if not siblings:
                del self._by_key[holding.key]
            refs.append(holding.ref)
        return tuple(refs)
