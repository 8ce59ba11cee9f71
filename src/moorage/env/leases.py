"""Leases: which attempt of which run an env server serves (docs/protocols.md section 1). Pure.

A holder is an attempt and a source, not a connection. Promises:

- one run at a time: another run is refused while a lease lives, and the refusal names the holder;
- a newer attempt of the run takes over from older ones; an older one is refused for ever;
- a holder silent for `LEASE_S` loses its lease; its later requests are refused until it says hello again.

It does not know what a holder has; it takes the time as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from moorage.core.errors import EnvServerError
from moorage.env.protocol import LEASE_S, Request


@dataclass(frozen=True)
class Holder:
    """An attempt of a run, asking on behalf of one source."""

    run_id: str
    attempt: int
    source: str

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.attempt}/{self.source}"

    def __str__(self) -> str:
        return f"run {self.run_id!r} attempt {self.attempt} ({self.source})"


def holder_of(request: Request) -> Holder:
    """Who sent this request."""
    return Holder(request.run_id, request.attempt, request.source)


class Leases:
    """Who may ask. `run_id` binds the server to one run; empty serves whoever says hello first."""

    def __init__(self, run_id: str = "", attempt: int = 0) -> None:
        self.run_id = run_id
        self._newest: dict[str, int] = {run_id: attempt} if run_id else {}
        self._heard: dict[Holder, float] = {}

    @property
    def holders(self) -> list[Holder]:
        return list(self._heard)

    def hello(self, holder: Holder, now: float) -> list[Holder]:
        """Take or renew a lease: the holders that lose theirs to it. Raises EnvServerError `refused`."""
        if self.run_id and holder.run_id != self.run_id:
            raise EnvServerError(
                "refused", f"this env server belongs to run {self.run_id!r}, not to {holder}"
            )
        for other in self._heard:
            if other.run_id != holder.run_id:
                raise EnvServerError("refused", f"this env server is leased by {other}; {holder} has to wait")
        newest = self._newest.get(holder.run_id, holder.attempt)
        if holder.attempt < newest:
            raise EnvServerError("refused", f"{holder} is out of date: attempt {newest} has taken over")
        self._newest[holder.run_id] = holder.attempt
        displaced = [other for other in self._heard if other.attempt < holder.attempt]
        for other in displaced:
            del self._heard[other]
        self._heard[holder] = now
        return displaced

    def check(self, holder: Holder, now: float) -> None:
        """Count this as a sign of life. Raises EnvServerError `refused` for a holder without a lease."""
        if holder not in self._heard:
            newest = self._newest.get(holder.run_id, holder.attempt)
            if holder.attempt < newest:
                raise EnvServerError("refused", f"{holder} is out of date: attempt {newest} has taken over")
            raise EnvServerError("refused", f"lease lost: {holder} has to say hello first")
        self._heard[holder] = now

    def check_bye(self, holder: Holder) -> None:
        """Whether the holder may end the attempt: needs no lease of its own (the launcher has none)."""
        if self._newest.get(holder.run_id, holder.attempt) > holder.attempt:
            raise EnvServerError("refused", f"{holder} is out of date: a newer attempt has taken over")
        owner = next(iter(self._heard), None)
        if (owner is not None and owner.run_id != holder.run_id) or self.run_id not in ("", holder.run_id):
            raise EnvServerError("refused", f"{holder} cannot end {owner or self.run_id}")

    def expire(self, now: float, after_s: float = LEASE_S) -> list[Holder]:
        """Take the leases of those silent for `after_s`."""
        silent = [holder for holder, heard in self._heard.items() if now - heard >= after_s]
        for holder in silent:
            del self._heard[holder]
        return silent

    def end(self, holder: Holder) -> None:
        """The holder said bye."""
        self._heard.pop(holder, None)
