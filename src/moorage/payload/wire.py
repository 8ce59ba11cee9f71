"""One kept-alive HTTP/1.1 connection to a payload service, and a pool of them.

Promises: every call ends by its deadline; body bytes go from the socket into the caller's buffer with no copy
in between; HTTP_PROXY and friends are never read. Errors: `ServiceAnswer` for a status that is no success,
OSError (TimeoutError included) for everything that a retry may mend. A connection that failed is closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.buffers import Target
from moorage.payload.connections import set_timeout
from moorage.payload.http import HEAD_END, MAX_HEAD_BYTES

_MAX_TEXT = 1 << 26
_WAKE_BYTES = 1 << 20
"""The kernel wakes a reader of a large answer each time so many bytes have come: a fifth faster than at each
packet, and cheaper at both ends."""


class ServiceAnswer(Exception):
    """The service answered, but with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Address(NamedTuple):
    host: str
    port: int


def parse_url(url: str) -> Address:
    """Host and port of `http://host:port`. Raises PayloadError for anything else."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "http" and parts.hostname and parts.port:
            return Address(parts.hostname, parts.port)
    except ValueError:
        pass
    raise PayloadError(f"{url!r} is not the url of a payload service; expected http://host:port")


class Connection:
    """Not for two threads at once."""

    def __init__(self, address: Address, token: str, deadline: float) -> None:
        self.used = 0
        self._address = address
        self._common = f"Host: {address.host}:{address.port}\r\nAuthorization: Bearer {token}\r\n"
        self._socket = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def read_into(
        self,
        path: str,
        target: Target,
        deadline: float,
        span: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """GET `path` (of it bytes `span`) into `target`."""
        extra = f"Range: bytes={span[0]}-{span[1] - 1}\r\n" if span else ""
        status, length, _ = self._ask("GET", path, b"", extra, deadline)
        expected = (span[1] - span[0]) if span else length
        if status not in (200, 206) or length != expected:
            raise ConnectionError(f"{path} answered {status} with {length} bytes where {expected} were due")
        buffer = target(length) if callable(target) else target
        if len(buffer) != length:
            raise ConnectionError(f"{path} answered {length} bytes for a buffer of {len(buffer)}")
        self._fill(buffer.data, deadline)
        return buffer

    def call(self, method: str, path: str, body: bytes, deadline: float) -> bytes:
        """The body of a small answer."""
        extra = f"Content-Length: {len(body)}\r\n" if body else ""
        _, length, _ = self._ask(method, path, body, extra, deadline)
        return self._read_text(length, deadline)

    def _ask(
        self, method: str, path: str, body: bytes, extra: str, deadline: float
    ) -> tuple[int, int, dict[str, str]]:
        self._wait(socket.SO_SNDTIMEO, deadline)
        self._socket.sendall(
            f"{method} {path} HTTP/1.1\r\n{self._common}{extra}\r\n".encode("latin-1") + body
        )
        head = self._read_head(deadline)
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ", 2)[1])
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = int(headers.get("content-length", "0"))
        self.used += 1
        if status >= 400:
            text = self._read_text(length, deadline).decode(errors="replace")
            if headers.get("connection") == "close":
                self.close()
            raise ServiceAnswer(status, text)
        return status, length, headers

    def _read_head(self, deadline: float) -> bytes:
        data = self._rest
        while HEAD_END not in data:
            if len(data) > MAX_HEAD_BYTES:
                raise ConnectionError("answer head without end")
            self._wait(socket.SO_RCVTIMEO, deadline)
            # Ask for little: what follows the head belongs in the caller's buffer, not in ours.
            chunk = self._socket.recv(1024)
            if not chunk:
                raise ConnectionResetError("the payload service closed the connection")
            data += chunk
        head, _, self._rest = data.partition(HEAD_END)
        return head

    def _fill(self, view: memoryview, deadline: float) -> None:
        got = min(len(self._rest), len(view))
        view[:got] = self._rest[:got]
        self._rest = self._rest[got:]
        bulk = len(view) - _WAKE_BYTES
        if bulk > got:  # so many bytes are still to come after these that the kernel may wait for them
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
            self._receive(view, got, bulk, deadline)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            got = bulk
        self._receive(view, got, len(view), deadline)

    def _receive(self, view: memoryview, start: int, stop: int, deadline: float) -> None:
        while start < stop:
            self._wait(socket.SO_RCVTIMEO, deadline)
            count = self._socket.recv_into(view[start:stop], 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError(
                    f"the payload service closed the connection after {start} of {len(view)} bytes"
                )
            start += count

    def _read_text(self, length: int, deadline: float) -> bytes:
        if length > _MAX_TEXT:
            raise ConnectionError(f"answer of {length} bytes")
        text = bytearray(length)
        self._fill(memoryview(text), deadline)
        return bytes(text)

    def _wait(self, option: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer from {self._address.host}:{self._address.port} by the deadline")
        set_timeout(self._socket, option, left)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def interrupt(self) -> None:
        """End the call that another thread makes on this connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class ConnectionPool:
    """Idle connections by address. Safe to use from several threads."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._idle: dict[Address, list[Connection]] = {}
        self._lent: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def lend(self, url: str, deadline: float) -> Iterator[Connection]:
        """A connection to `url`; it comes back to the pool unless its user failed."""
        address = parse_url(url)
        with self._lock:
            idle = self._idle.get(address)
            connection = idle.pop() if idle else None
        if connection is None:
            connection = Connection(address, self._token, deadline)
        with self._lock:
            self._lent.add(connection)
        usable = False
        try:
            yield connection
            usable = True
        except ServiceAnswer:
            usable = True
            raise
        finally:
            with self._lock:
                self._lent.discard(connection)
            if not usable:
                connection.close()
            self._take_back(address, connection)

    def _take_back(self, address: Address, connection: Connection) -> None:
        with self._lock:
            if not self._closed and not connection.closed:
                self._idle.setdefault(address, []).append(connection)
                return
        connection.close()

    def drop(self, url: str) -> None:
        """Close the idle connections to `url`: they are as stale as the one that just failed."""
        with self._lock:
            connections = self._idle.pop(parse_url(url), [])
        for connection in connections:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
            lent = list(self._lent)
        for connection in lent:
            connection.interrupt()
        for connection in connections:
            connection.close()
