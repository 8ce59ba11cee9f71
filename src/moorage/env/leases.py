"""Leases: which attempt of which run an env server serves (docs/protocols.md section 1). Pure.

A holder is an attempt and a source, not a connection. Promises:

- one run at a time: another run is refused while a lease lives, and the refusal names the holder;
- a newer attempt of the run takes over from older ones, and another run from one whose leases are lost;
- whoever is taken over from is refused for ever, its late `bye` too: none goes on without what it had;
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
        self._served: Holder | None = None
        self._is_over = False
        self._displaced: dict[tuple[str, int], Holder] = {}

    @property
    def holders(self) -> list[Holder]:
        return list(self._heard)

    def hello(self, holder: Holder, now: float) -> Holder | None:
        """Take or renew a lease. Raises EnvServerError `refused`.

        Returns a holder of the attempt that was served before when this is another one, whether or not a
        lease of it still lived: nothing of what is here belongs to the new one.
        """
        self._check_run(holder)
        self._check_age(holder)
        for other in self._heard:
            if other.run_id != holder.run_id:
                raise EnvServerError("refused", f"this env server is leased by {other}; {holder} has to wait")
        before, was_over = self._served, self._is_over
        self._served, self._is_over = holder, False
        self._newest[holder.run_id] = holder.attempt
        if before is None or _attempt_of(before) == _attempt_of(holder):
            self._heard[holder] = now
            return None
        if not was_over:
            self._displaced[_attempt_of(before)] = holder
        self._heard = {holder: now}
        return before

    def check(self, holder: Holder, now: float) -> None:
        """Count this as a sign of life. Raises EnvServerError `refused` for a holder without a lease."""
        if holder not in self._heard:
            self._check_age(holder)
            raise EnvServerError("refused", f"lease lost: {holder} has to say hello first")
        self._heard[holder] = now

    def bye(self, holder: Holder) -> None:
        """End the attempt and its leases. Needs no lease of its own (the launcher has none).

        Raises EnvServerError `refused` when a newer attempt or another run was served since.
        """
        self._check_run(holder)
        self._check_age(holder)
        if self._served is not None and self._served.run_id != holder.run_id:
            raise EnvServerError("refused", f"{holder} cannot end {self._served}")
        self._newest[holder.run_id] = holder.attempt
        self._heard.clear()
        self._is_over = True

    def expire(self, now: float, after_s: float = LEASE_S) -> list[Holder]:
        """Take the leases of those silent for `after_s`."""
        silent = [holder for holder, heard in self._heard.items() if now - heard >= after_s]
        for holder in silent:
            del self._heard[holder]
        return silent

    def _check_run(self, holder: Holder) -> None:
        if self.run_id and holder.run_id != self.run_id:
            raise EnvServerError(
                "refused", f"this env server belongs to run {self.run_id!r}, not to {holder}"
            )

    def _check_age(self, holder: Holder) -> None:
        newest = self._newest.get(holder.run_id, holder.attempt)
        if holder.attempt < newest:
            raise EnvServerError("refused", f"{holder} is out of date: attempt {newest} has taken over")
        if (other := self._displaced.get(_attempt_of(holder))) is not None:
            raise EnvServerError(
                "refused", f"{holder} is out of date: its lease was lost and {other} has taken over"
            )


def _attempt_of(holder: Holder) -> tuple[str, int]:
    return holder.run_id, holder.attempt
