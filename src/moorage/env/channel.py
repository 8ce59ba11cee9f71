"""The channel between a broker and one worker: a socket pair with length-prefixed messages.

A socket pair has no address and no file, needs no secret, and tells each side at once when the other has
died. Promises: messages arrive whole and in order; `on_lost` is called exactly once, when the other side is
gone. It does not know what the messages mean beyond their kind.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import IntEnum

_HEADER = struct.Struct("<IBdB")  # length of id and body, kind, number, length of id


class Kind(IntEnum):
    """What a message is. Broker to worker: CONFIG, RUN, GROUP, CANCEL, STOP; the others go back."""

    CONFIG = 1
    RUN = 2
    GROUP = 3
    CANCEL = 4
    STOP = 5
    READY = 6
    BEAT = 7
    DONE = 8
    FAILED = 9
    FATAL = 10


Handler = Callable[[int, bytes, float, bytes], None]
"""(kind, request id, number, body). The number is a deadline in seconds (RUN, GROUP), or 1 when
something may have been kept, else 0 (DONE, FAILED)."""


class Channel(asyncio.Protocol):
    """One end of the socket pair, on the running loop."""

    def __init__(self, on_message: Handler, on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._leaving: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Handler, on_lost: Callable[[], None]) -> Channel:
        """Take over a connected socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_message, on_lost), sock=sock)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, at, end = self._buffer, 0, len(self._buffer)
        while end - at >= _HEADER.size:
            length, kind, number, id_length = _HEADER.unpack_from(buffer, at)
            start = at + _HEADER.size
            if end - start < length:
                break
            split = start + id_length
            at = start + length
            self._on_message(kind, bytes(buffer[start:split]), number, bytes(buffer[split:at]))
        if at:
            del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._on_lost()

    def send(self, kind: Kind, request_id: bytes = b"", number: float = 0.0, body: bytes = b"") -> None:
        """Send a message at the end of this turn of the loop, together with others of the turn.

        Silently dropped when the other side is gone: `on_lost` says so.
        """
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._flush)
        header = _HEADER.pack(len(request_id) + len(body), kind, number, len(request_id))
        self._leaving += (header, request_id, body)

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(leaving)

    def close(self) -> None:
        """Close after sending what is queued."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
