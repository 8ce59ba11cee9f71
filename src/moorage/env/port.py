"""A ZMQ socket on the running asyncio loop, without a coroutine per message.

`zmq.asyncio` costs a future and several polls for each message; a broker that forwards thousands a second
reads them in batches instead. Promises: `on_frames` is called once for each whole message, in order, from the
loop; a message that cannot be sent now is reported to the caller (`send` returns False), never lost silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

BATCH = 200
_SAFETY_S = 0.1
COPY_BELOW_BYTES = 65536
_LAST = int(zmq.DONTWAIT)
_NOT_LAST = int(zmq.DONTWAIT | zmq.SNDMORE)
"""Numbers: combining pyzmq's flags for each frame costs four times what sending does."""


class Port:
    """Reads `socket` from the loop and sends without waiting."""

    def __init__(self, socket: zmq.Socket, on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._read)
        self._again: asyncio.Handle | None = None
        self._closed = False
        self._safety = self._loop.call_later(_SAFETY_S, self._tick)

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False when the peer is not there or takes nothing now."""
        *firsts, last = frames
        try:
            for frame in firsts:
                self.socket.send(frame, _NOT_LAST, copy=True, track=False)
            self.socket.send(last, _LAST, copy=len(last) < COPY_BELOW_BYTES, track=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        self._look_again()  # sending may have used up the edge that announces a message
        return True

    def _look_again(self) -> None:
        if self._again is None and not self._closed:
            self._again = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._again = None
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_frames(frames)
        self._look_again()

    def _tick(self) -> None:
        """The descriptor is edge-triggered: look now and then in case an edge was missed."""
        self._read()
        if not self._closed:
            self._safety = self._loop.call_later(_SAFETY_S, self._tick)

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading and close the socket, giving queued messages `linger_ms` to leave."""
        if self._closed:
            return
        self._closed = True
        self._safety.cancel()
        self._loop.remove_reader(self._fd)
        self.socket.close(linger_ms)
