"""Payloads that this process owns, and their release (R5).

`payload.custody` decides who may free what; this is its shell: releases are collected and sent by one task,
in a thread, in bulk. Promises: a payload is released once or handed to the trainer once; what a server did
not take stays with the client and is tried again; `close` releases everything that is still held, as
`shutdown`.

Payloads are held per trace id. Does not know episodes or batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from moorage.core.log import get_logger
from moorage.orchestrator.payloads import payload_refs
from moorage.payload.custody import Custody
from moorage.records.payload import PayloadRef, PayloadSlice, TracePayload

log = get_logger(__name__)

Holder = Literal["dispatcher", "train_sink", "eval_sink"]
HOLDERS: tuple[Holder, ...] = ("dispatcher", "train_sink", "eval_sink")
COLLECT_S = 0.05


class Releaser(Protocol):
    """The half of `payload.client.PayloadClient` that frees. Called in a thread."""

    def release(
        self, refs: Iterable[PayloadRef | PayloadSlice], by: str, deadline_s: float = 10.0
    ) -> int: ...

    @property
    def pending_releases(self) -> list[Any]: ...


class Holdings:
    """Custody of one orchestrator. Start `run` as a task; `close` at the end."""

    def __init__(self, client: Releaser, *, final_timeout_s: float = 4.0) -> None:
        self.custody: dict[Holder, Custody] = {holder: Custody(holder) for holder in HOLDERS}
        self.released: dict[str, int] = dict.fromkeys((*HOLDERS, "shutdown"), 0)
        self._client = client
        self._queue: dict[str, list[PayloadRef | PayloadSlice]] = {}
        self._sending: set[asyncio.Future[int]] = set()
        self._wake = asyncio.Event()
        self._final_timeout_s = final_timeout_s

    def hold(self, payloads: Mapping[str, TracePayload | None], holder: Holder) -> None:
        """Take ownership of an episode's payloads: it was acknowledged."""
        for trace_id, payload in payloads.items():
            self.custody[holder].hold(trace_id, payload_refs(payload))

    def hand_over(self, trace_ids: Iterable[str], giver: Holder, taker: Holder) -> None:
        """Pass ownership on inside this process."""
        for trace_id in trace_ids:
            self.custody[taker].hold(trace_id, self.custody[giver].hand_over_key(trace_id, taker))

    def ship(self, ids: Iterable[str], giver: Holder) -> None:
        """The trainer owns these blobs now: their batch is READY."""
        self.custody[giver].hand_over(ids, "trainer")

    def release(self, trace_ids: Iterable[str], holder: Holder) -> None:
        """Free all that `holder` holds for these traces. Sent soon, by `run`."""
        for trace_id in trace_ids:
            self._send(self.custody[holder].release_key(trace_id), holder)

    def release_ids(self, ids: Iterable[str], holder: Holder) -> None:
        """Free single blobs: branches of a trace that trains others."""
        self._send(self.custody[holder].release(ids), holder)

    def _send(self, refs: Iterable[PayloadRef | PayloadSlice], by: str) -> None:
        refs = list(refs)
        if refs:
            self._queue.setdefault(by, []).extend(refs)
            self.released[by] += len(refs)
            self._wake.set()

    async def run(self) -> None:
        """Send releases for ever. Unblocked by a release; cancelled by the owner, `close` sends the rest."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()
            await asyncio.sleep(COLLECT_S)  # one request for many ids

    async def flush(self) -> None:
        """Send everything that is queued. A send that has begun goes on when this is cancelled; `close` waits
        for it. What a server does not take is carried over by the client."""
        queued, self._queue = self._queue, {}
        for holder, refs in queued.items():
            send = asyncio.ensure_future(asyncio.to_thread(self._client.release, refs, holder))
            self._sending.add(send)
            send.add_done_callback(self._sending.discard)
        if self._sending:
            await asyncio.shield(asyncio.gather(*self._sending))

    async def close(self) -> None:
        """Release all that is still held here, as `shutdown`, and wait (bounded) until it is delivered."""
        for custody in self.custody.values():
            self._send(
                custody.hand_over([each.ref.id for each in custody.outstanding], "shutdown"), "shutdown"
            )
        try:
            async with asyncio.timeout(self._final_timeout_s):
                await self.flush()
                while self._client.pending_releases:
                    await asyncio.sleep(0.2)
                    await asyncio.to_thread(self._client.release, [], "shutdown")
        except TimeoutError:
            pending = len(self._client.pending_releases)
            log.warning("%d releases were not delivered within %g s", pending, self._final_timeout_s)

    @property
    def num_outstanding(self) -> int:
        """Blobs held here."""
        return sum(len(custody) for custody in self.custody.values())
