"""Says what is awaited, and from whom, when nothing has moved for a while (R35)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from moorage.core.log import get_logger

log = get_logger(__name__)

REPORT_S = 60.0


class StallReporter:
    """Every loop says through `awaits` what it waits for; `moved` is called when a step ships or a
    measurement ends. Start `run` as a task."""

    def __init__(self, awaits: Callable[[], dict[str, str]], *, report_s: float = REPORT_S) -> None:
        self._awaits = awaits
        self._report_s = report_s
        self._moved_at = time.monotonic()
        self.num_reports = 0

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    async def run(self) -> None:
        """Report for ever, every `report_s` without movement."""
        reported_at = self._moved_at
        while True:
            await asyncio.sleep(min(1.0, self._report_s / 4))
            still_s = time.monotonic() - max(self._moved_at, reported_at)
            if still_s >= self._report_s:
                reported_at = time.monotonic()
                self.num_reports += 1
                log.warning("%s", self.describe())

    def describe(self) -> str:
        """One line: since when, and who waits for what."""
        waits = "; ".join(f"{who} waits for {what}" for who, what in self._awaits().items() if what)
        return f"nothing has moved for {time.monotonic() - self._moved_at:.0f} s: {waits or 'nobody waits'}"
