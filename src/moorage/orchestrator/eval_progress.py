"""What a person sees while `moorage eval` runs: one line on standard error.

In a terminal the line is redrawn in place; elsewhere a new one is written every few seconds, and a last one
at the end. Does not know sources or rewards.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TextIO

PROGRESS_S = 2.0
LIVE_S = 0.2


class Progress:
    """`counts()` gives (episodes done, episodes running) of `total`."""

    def __init__(self, total: int, counts: Callable[[], tuple[int, int]], out: TextIO | None = None) -> None:
        self.total = total
        self._counts = counts
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty()
        self._began = time.monotonic()
        self._there, _ = counts()
        self._width = 0

    async def run(self) -> None:
        """Show the state for ever. Unblocked by the clock."""
        while True:
            await asyncio.sleep(LIVE_S if self._live else PROGRESS_S)
            self._show()

    def close(self) -> None:
        """Show the last state, on a line of its own."""
        self._show()
        if self._live:
            print(file=self._out, flush=True)

    def _show(self) -> None:
        done, running = self._counts()
        line = render_progress(done, self.total, running, done - self._there, time.monotonic() - self._began)
        if self._live:
            self._width = max(self._width, len(line))
            print(f"\r{line.ljust(self._width)}", end="", file=self._out, flush=True)
        else:
            print(line, file=self._out, flush=True)


def render_progress(done: int, total: int, running: int, new: int, elapsed_s: float) -> str:
    """`new`: how many of the `done` ended within `elapsed_s`; the rest was there before."""
    parts = [f"{done}/{total} episodes", f"{running} running"]
    if new and done < total:
        rate = new / max(elapsed_s, 1e-9)
        minutes, seconds = divmod(round((total - done) / rate), 60)
        parts += [f"{rate:.3g}/s", f"{minutes}:{seconds:02} left"]
    return "  ".join(parts)
