"""A client's verdicts on runs: ids go out as `ack` or `cancel`, all of one turn of the loop in one message.

Promises: each verdict is delivered or ends with the reason why not; a lost `ack` is sent again. The `ack`
future of a call ends with what the server answered. Does not know when to give which verdict.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moorage.core.aio import TaskOwner
from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire
from moorage.env.calls import Call, Calls

ACK_S = 30.0


@dataclass(eq=False)
class _Batch:
    """Ids that go out in one message at the end of this turn of the loop."""

    ids: list[str] = field(default_factory=list)
    handle: asyncio.Handle | None = None
    sent: asyncio.Future[bytes] | None = None


class Verdicts:
    """Of one client, on its loop."""

    def __init__(self, calls: Calls, who: dict[str, Any], owner: TaskOwner) -> None:
        """`who`: what every request says of its sender."""
        self._calls = calls
        self._who = who
        self._owner = owner
        self._acks = _Batch()
        self._cancels = _Batch()

    def ack(self, call: Call) -> None:
        """Its episodes are wanted; `call.ack` says whether they are ours."""
        self._add(self._acks, call.id)

    def cancel(self, request_id: str) -> asyncio.Future[bytes]:
        """Nobody wants this run. The future ends when the server has answered, or with the reason why not."""
        return self._add(self._cancels, request_id)

    def _add(self, batch: _Batch, request_id: str) -> asyncio.Future[bytes]:
        loop = asyncio.get_running_loop()
        batch.ids.append(request_id)
        if batch.handle is None:
            batch.sent = loop.create_future()
            batch.sent.add_done_callback(lambda f: f.cancelled() or f.exception())
            batch.handle = loop.call_soon(self._flush, batch)
        assert batch.sent is not None
        return batch.sent

    def _flush(self, batch: _Batch) -> None:
        ids, sent = tuple(batch.ids), batch.sent
        batch.ids, batch.handle, batch.sent = [], None, None
        assert sent is not None
        self._owner.start(self._deliver(batch is self._acks, ids, sent), "verdicts")

    async def _deliver(self, is_ack: bool, ids: tuple[str, ...], sent: asyncio.Future[bytes]) -> None:
        try:
            if is_ack:
                async with asyncio.timeout(ACK_S):
                    reply = await self._calls.ask(b"ack", wire.Ack(**self._who, ids=ids), retry=True)
                self._on_acked(msgspec.msgpack.decode(reply, type=wire.AckReply))
            else:
                async with asyncio.timeout(wire.CANCEL_S + 1):
                    reply = await self._calls.ask(b"cancel", wire.Cancel(**self._who, ids=ids))
            sent.set_result(reply)
        except (EnvServerError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = EnvServerError("unreachable", f"env server {self._calls.address} did not answer")
            if not sent.done():
                sent.set_exception(error)
            for request_id in ids if is_ack else ():
                self._end_ack(request_id, error)

    def _on_acked(self, reply: wire.AckReply) -> None:
        for request_id in reply.owned:
            self._end_ack(request_id, True)
        for request_id in reply.unknown:
            self._end_ack(request_id, False)

    def _end_ack(self, request_id: str, owned: bool | EnvServerError) -> None:
        if (call := self._calls.get(request_id)) is not None:
            call.end_ack(owned)
