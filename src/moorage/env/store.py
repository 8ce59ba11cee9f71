"""The broker's hand on the payloads: the spool it discards from, and the service that serves it.

Promises: discards happen in the order they were asked for, off the event loop; a payload service that dies is
started again on the same port; at the end nothing that nobody may fetch any more is left on disk.
It does not know why something is discarded, nor who asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from moorage.config.env import EnvServerConfig
from moorage.core.errors import PayloadError
from moorage.core.log import get_logger
from moorage.payload.server import PayloadService
from moorage.payload.spool import Spool, choose_spool_root
from moorage.records.payload import Ledger

MIB = 1 << 20
WATCH_S = 0.5
LEDGER_AGE_S = 1.0
REMEMBERED = 200_000
"""Freed ids kept in mind, so that a repeated release is told from one of an id never kept."""
log = get_logger(__name__)


class Store:
    """Spool and payload service of one env server."""

    def __init__(self, config: EnvServerConfig, name: str, server_id: str, token: str) -> None:
        self.name = name
        self.retained = config.retain == "checkpoint"
        self.attempt_key = f"attempt-{config.attempt}" if config.run_id else server_id
        self.root = choose_spool_root(
            name,
            run_id=config.run_id or server_id,
            budget_bytes=config.spool_budget_mib * MIB,
            spool_dir=config.spool_dir,
            run_dir=config.run_dir,
            retain=config.retain,
        )
        self.restarts = 0
        self._adopted = False
        self.ready = not (self.retained and config.attempt > 1)
        self._service = PayloadService(self.root, config.source.host, config.payload_port, token)
        self._spool: Spool | None = None
        # one thread: keeps discards in order, and is the parent the kernel knows of the service process
        self._thread = ThreadPoolExecutor(1, "store")
        self._ledger: tuple[float, dict[str, Any]] | None = None
        self._account_start = Ledger()
        self._failure: Exception | None = None

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def service_pid(self) -> int:
        """The process that serves, 0 when there is none."""
        return self._service.pid or 0

    @property
    def folder(self) -> str | None:
        """What the launcher may remove after the attempt; None when it has to survive."""
        return None if self.retained else str(self.root)

    async def start(self) -> None:
        """Make the spool and start the service. Raises PayloadError."""

        def start() -> None:
            self._spool = Spool(self.root, self.attempt_key, remember=REMEMBERED)
            self._spool.own()
            self._service.start()

        await self._call(start)

    async def watch(self) -> None:
        """Start the service again whenever it is gone; runs for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._failure is not None:
                raise self._failure
            if not self._service.alive():
                self.restarts += 1
                log.error("the payload service died and is started again (restart %d)", self.restarts)
                await self._call(self._service.restart)

    def discard(self, request_id: str) -> None:
        """Free what was kept for a request. Returns at once; failures end the server."""
        self._thread.submit(self._discard, request_id)

    def _discard(self, request_id: str) -> None:
        try:
            assert self._spool is not None
            self._spool.discard(request_id, "env_server")
        except PayloadError as error:
            self._failure = error

    async def adopt(self, blob_ids: Iterable[str]) -> None:
        """Take what the resumed run still needs from earlier attempts, and remove the rest of theirs.

        Then the store is `ready`. Until it is, a retained blob is not found here, so nobody should ask.
        """
        if self._adopted:
            return
        self._adopted = True
        wanted = tuple(blob_ids)

        def adopt() -> None:
            assert self._spool is not None
            found = self._spool.adopt(wanted)
            lost = self._spool.lost_attempts()
            for key in lost:
                self._spool.remove_attempt(key)
            if wanted or lost:
                log.info(
                    "adopted %d of %d payloads, removed %d old attempts", len(found), len(wanted), len(lost)
                )

        await self._call(adopt)
        self.ready = True

    async def discard_all(self, holder: str, retain: Iterable[str] = ()) -> None:
        """Free everything but `retain`."""
        assert self._spool is not None
        await self._call(self._spool.discard_all, holder, tuple(retain))

    async def begin_account(self) -> None:
        """From here on the account is another attempt's; what is outstanding now counts as kept by it."""
        assert self._spool is not None
        self._account_start = await self._call(self._spool.ledger)
        self._ledger = None

    async def ledger(self, *, fresh: bool = False) -> dict[str, Any]:
        """The account of the attempt that is served as plain data, at most a second old."""
        now = time.monotonic()
        if fresh or self._ledger is None or now - self._ledger[0] > LEDGER_AGE_S:
            assert self._spool is not None
            total: Ledger = await self._call(self._spool.ledger)
            self._ledger = (now, msgspec.to_builtins(total.since(self._account_start)))
        return self._ledger[1]

    async def stop(self) -> None:
        """Free what is left (or keep it for the next attempt), and end the service."""

        def stop() -> None:
            self._service.stop()
            if self._spool is None:
                return
            if not self.retained:
                self._spool.discard_all("shutdown")
            self._spool.close()
            if not self.retained:
                self._remove()

        await self._call(stop)
        self._thread.shutdown(wait=True)

    def _remove(self) -> None:
        from moorage.payload.spool import remove_attempt

        remove_attempt(self.root, self.attempt_key)
        for folder in (
            self.root,
            *list(self.root.parents)[:2],
        ):  # store, split, run: as far as they are empty
            try:
                folder.rmdir()
            except OSError:
                return

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
