"""Who may start now: permits, the rate limit, burst smoothing. Pure; time is an argument.

One permit is one episode, train and eval alike. Promises:
- permits in use never rise above the cap by a start; lowering the cap stops nothing that runs;
- starts are at least `60 / episodes_per_minute` apart on average, without saving up for later;
- within any `BURST_WINDOW_S`, starts that no completion made room for stay at or below `max_burst`.
"""

from __future__ import annotations

from collections import deque

from moorage.orchestrator.groups import Split

BURST_WINDOW_S = 5.0


class Admission:
    """Permits of one dispatcher."""

    def __init__(
        self, cap: int, *, episodes_per_minute: float | None = None, max_burst: int | None = None
    ) -> None:
        self.cap = cap
        self.in_use: dict[Split, int] = {"train": 0, "eval": 0}
        self._interval_s = 60.0 / episodes_per_minute if episodes_per_minute else 0.0
        self._next_at = float("-inf")
        self._max_burst = max_burst
        self._unpaid: deque[float] = deque()

    @property
    def total(self) -> int:
        return self.in_use["train"] + self.in_use["eval"]

    def move_cap(self, cap: int) -> None:
        """Change the cap while running. What runs above it drains by itself."""
        if cap < 1:
            raise ValueError(f"cap {cap} would stop everything; use at least 1")
        self.cap = cap

    def wait_s(self, num_episodes: int, now: float) -> float | None:
        """0 when `num_episodes` may start now, the seconds until they may, or None: until a permit is free.

        A work that costs more than the whole cap may start when nothing else runs, so that a cap that was
        moved down cannot lock out a group run.
        """
        if self.total + num_episodes > self.cap and self.total > 0:
            return None
        wait = max(0.0, self._next_at - now) if self._interval_s else 0.0
        if self._max_burst is not None:
            self._expire(now)
            excess = len(self._unpaid) + num_episodes - max(self._max_burst, num_episodes)
            if excess > 0:
                wait = max(wait, self._unpaid[excess - 1] + BURST_WINDOW_S - now)
        return wait

    def take(self, split: Split, num_episodes: int, now: float) -> None:
        """Start `num_episodes`; the caller asked `wait_s` before."""
        self.in_use[split] += num_episodes
        if self._interval_s:
            self._next_at = max(self._next_at, now) + self._interval_s * num_episodes
        if self._max_burst is not None:
            self._unpaid.extend([now] * num_episodes)

    def release(self, split: Split, num_episodes: int, *, natural: bool) -> None:
        """Give permits back. A natural end pays for one start each; a cancellation does not."""
        if num_episodes > self.in_use[split]:
            raise ValueError(f"{num_episodes} {split} permits released, {self.in_use[split]} in use")
        self.in_use[split] -= num_episodes
        if natural and self._unpaid:
            for _ in range(min(num_episodes, len(self._unpaid))):
                self._unpaid.popleft()

    def _expire(self, now: float) -> None:
        while self._unpaid and self._unpaid[0] <= now - BURST_WINDOW_S:
            self._unpaid.popleft()
