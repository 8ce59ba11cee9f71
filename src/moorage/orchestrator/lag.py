"""How late the event loop runs its timers, in seconds: the sign of CPU work that should not be on it."""

from __future__ import annotations

import asyncio

from moorage.core.metrics import quantile

PERIOD_S = 0.1


class LoopLag:
    """Samples in `run`; `take` returns the window's figures and begins the next."""

    def __init__(self) -> None:
        self._samples: list[float] = []

    async def run(self) -> None:
        """Sample for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._samples.append(max(0.0, loop.time() - due))

    def take(self) -> dict[str, float]:
        """`event_loop_lag/{min,mean,median,p90,p99,max,n}` since the last call; all 0 of none."""
        samples, self._samples = sorted(self._samples), []
        ordered = samples or [0.0]
        return {
            "event_loop_lag/min": ordered[0],
            "event_loop_lag/mean": sum(ordered) / len(ordered),
            "event_loop_lag/median": quantile(ordered, 0.5),
            "event_loop_lag/p90": quantile(ordered, 0.9),
            "event_loop_lag/p99": quantile(ordered, 0.99),
            "event_loop_lag/max": ordered[-1],
            "event_loop_lag/n": len(samples),
        }
