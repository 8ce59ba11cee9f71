"""The live policy version, and the watcher that takes new weights to the engines.

One order for every version: cancel work that would be too stale and wait for the answers (engines still run,
so aborts are served), then the fleet pauses, loads, labels and resumes all replicas, then the version is
live here. Versions that are skipped because a newer one is READY are never loaded. Waits for the trainer;
ends with it (R35).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir
from moorage.exchange.weights import newest_version

log = get_logger(__name__)

POLL_S = 0.05
CHECK_S = 1.0


@dataclass
class Policy:
    """What the engines hold. Shared by reference; only the watcher writes it."""

    model: str
    version: int


class Engines(Protocol):
    """The part of `engine.fleet.Fleet` that the orchestrator uses."""

    async def update_weights(
        self, path: str | Path, version: int, before_pause: Callable[[], Awaitable[Any]] | None = None
    ) -> None: ...

    async def watch(self) -> None: ...

    def pick(self, session_key: str) -> str: ...

    def begin(self, url: str) -> None: ...

    def end(self, url: str) -> None: ...


class PolicyWatcher:
    """Follows the weights in the run folder until `last_version` is live."""

    def __init__(
        self,
        run: RunDir,
        policy: Policy,
        engines: Engines,
        *,
        last_version: int,
        watch: PeerWatch,
        before_pause: Callable[[], Awaitable[None]],
        on_live: Callable[[int], None],
    ) -> None:
        self.run_dir = run
        self.policy = policy
        self.engines = engines
        self.last_version = last_version
        self.num_updates = 0
        self.last_update_s = 0.0
        self.last_wait_s = 0.0
        self._watch = watch
        self._before_pause = before_pause
        self._on_live = on_live
        self._live = asyncio.Condition()

    async def run(self) -> None:
        """Take every new version live; returns after the last one. Unblocked by the trainer's READY."""
        while self.policy.version < self.last_version:
            await self._apply(await self._wait_newer())

    async def first(self, version: int) -> None:
        """Wait for `version` (the trainer publishes it at its start) or a newer one, and take it live."""
        await self._apply(await self._wait_newer(version - 1))

    async def wait_live(self, version: int) -> None:
        """Return once `version` or a newer one is live. Unblocked by `run`."""
        async with self._live:
            await self._live.wait_for(lambda: self.policy.version >= version)

    async def _wait_newer(self, than: int | None = None) -> int:
        than = self.policy.version if than is None else than
        started = checked = time.monotonic()
        while True:
            newest = newest_version(self.run_dir)
            if newest is not None and newest > than:
                self.last_wait_s = time.monotonic() - started
                return newest
            if time.monotonic() - checked > CHECK_S:
                self._watch.check()
                checked = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def _apply(self, version: int) -> None:
        started = time.monotonic()
        await self.engines.update_weights(
            self.run_dir.weight(version), version, before_pause=self._before_pause
        )
        self.last_update_s = time.monotonic() - started
        self.num_updates += 1
        async with self._live:
            self.policy.version = version
            self._live.notify_all()
        log.info("policy version %d is live after %.2f s", version, self.last_update_s)
        self._on_live(version)

    def metrics(self) -> dict[str, float]:
        return {
            "policy/version": self.policy.version,
            "watcher/policy_version": self.policy.version,
            "watcher/update_count": self.num_updates,
            "watcher/last_update_weights_time": self.last_update_s,
            "watcher/last_wait_for_ckpt_time": self.last_wait_s,
        }
