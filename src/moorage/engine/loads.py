"""Which replica takes the next episode. Pure.

Owns own counts, gauges as last polled, and which replica a session is bound to. Promises:

- a session stays on its replica (its prefix cache is there) as long as the replica is known;
- a new session goes to the replica with the least work: the gauge as polled, corrected by what was begun and
  ended here since, never less than what runs from here;
- the table of sessions is bounded: the oldest is forgotten.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

MAX_SESSIONS = 65_536

_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})?\s+(\S+)", re.M
)


@dataclass(frozen=True)
class Gauges:
    """An engine's own view: requests decoded, requests queued, share of cache in use (fullest rank)."""

    running: float = 0.0
    waiting: float = 0.0
    cache_usage: float = 0.0


def parse_gauges(text: str) -> Gauges:
    """The gauges in an engine's `/metrics` text, summed over its data-parallel ranks."""
    values: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(text):
        values.setdefault(name, []).append(float(value))
    return Gauges(
        running=sum(values.get("num_requests_running", ())),
        waiting=sum(values.get("num_requests_waiting", ())),
        cache_usage=max(values.get("kv_cache_usage_perc", ()), default=0.0),
    )


class Loads:
    """Counts and choices for a fixed set of replicas."""

    def __init__(self, urls: list[str]) -> None:
        self._own = dict.fromkeys(urls, 0)
        self._gauges = dict.fromkeys(urls, Gauges())
        self._own_when_polled = dict.fromkeys(urls, 0)
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def begin(self, url: str) -> None:
        """An episode begins to use `url`."""
        self._own[url] += 1

    def end(self, url: str) -> None:
        """It has ended, however."""
        if self._own[url] <= 0:
            raise ValueError(f"{url} has no load to end")
        self._own[url] -= 1

    def own(self, url: str) -> int:
        """Episodes that use `url` from here."""
        return self._own[url]

    def observe(self, url: str, gauges: Gauges) -> None:
        """Take over freshly polled gauges."""
        self._gauges[url] = gauges
        self._own_when_polled[url] = self._own[url]

    def gauges(self, url: str) -> Gauges:
        """The gauges as last polled."""
        return self._gauges[url]

    def estimate(self, url: str) -> float:
        """How much work `url` has now."""
        seen = self._gauges[url].running + self._gauges[url].waiting
        return max(self._own[url], seen + self._own[url] - self._own_when_polled[url])

    @property
    def num_sessions(self) -> int:
        """Sessions that are remembered."""
        return len(self._sessions)

    def pick(self, session: str) -> str:
        """The replica for `session`."""
        url = self._sessions.get(session)
        if url is None:
            url = min(self._own, key=self.estimate)
            self._sessions[session] = url
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        return url
