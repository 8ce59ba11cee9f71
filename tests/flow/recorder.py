"""A TCP forwarder that keeps what passes, and the ZMTP messages in it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

GREETING_BYTES = 64


class Recorder:
    """Forwards loopback connections to `host:port`; `sent_back` has the bytes of the server's side."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.sent_back: list[bytearray] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            self._sockets += [client, server]
            kept = bytearray()
            self.sent_back.append(kept)
            threading.Thread(target=_forward, args=(client, server, None), daemon=True).start()
            threading.Thread(target=_forward, args=(server, client, kept), daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def messages(self) -> Iterator[list[bytes]]:
        """Every message that a server sent, as its frames."""
        for stream in self.sent_back:
            yield from read_messages(bytes(stream))


def _forward(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
    try:
        while data := source.recv(65536):
            if kept is not None:
                kept += data
            sink.sendall(data)
    except OSError:
        return
    finally:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def read_messages(stream: bytes) -> Iterator[list[bytes]]:
    """Messages of one direction of a ZMTP 3 connection without security; its commands are left out."""
    at, frames = GREETING_BYTES, []
    while at + 2 <= len(stream):
        flags = stream[at]
        wide = 8 if flags & 2 else 1
        size = int.from_bytes(stream[at + 1 : at + 1 + wide], "big")
        at += 1 + wide
        if at + size > len(stream):
            return
        if not flags & 4:
            frames.append(stream[at : at + size])
            if not flags & 1:
                yield frames
                frames = []
        at += size
