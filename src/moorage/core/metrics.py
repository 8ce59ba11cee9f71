"""Counters and distributions that turn into flat metric names.

Every registered series is emitted every step, zeros included (R18): a `Counters` is built with its full key
set and never grows a key by being counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


class Counters:
    """A fixed set of named counts. `take()` returns them and starts the next window at zero."""

    def __init__(self, names: Iterable[str]) -> None:
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` under `name`; an unregistered name is a KeyError."""
        self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._counts)

    def take(self) -> dict[str, int]:
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken


def describe(name: str, values: Iterable[float]) -> dict[str, float]:
    """`name/{mean,max,min,p10,p90}` of `values`; empty input gives no keys."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"{name}/mean": math.fsum(ordered) / len(ordered),
        f"{name}/max": ordered[-1],
        f"{name}/min": ordered[0],
        f"{name}/p10": quantile(ordered, 0.1),
        f"{name}/p90": quantile(ordered, 0.9),
    }


def quantile(ordered: list[float], q: float) -> float:
    """Linear-interpolation quantile of an ascending, non-empty list."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """`values` without NaN and infinities, which no metrics file should hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
