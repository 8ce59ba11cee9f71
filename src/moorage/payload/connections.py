"""The payload service's sockets: one thread per connection, blobs sent by the kernel.

Promises:
- every request needs the bearer token, compared in constant time; a wrong one is answered 401 and closed;
- at most `max_connections` at a time (one more is answered 503 and closed), heads and bodies are bounded, an
  idle connection is closed after `idle_timeout_s`, a head must arrive within `head_timeout_s`, a reader that
  takes nothing for `send_timeout_s` is dropped;
- blob bytes are not held in this process: small blobs go from file to socket by `sendfile`, large ones out of
  their mapped files; an answer whose blob is freed before all of it was copied ends short, closed.

Timeouts are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), so sockets stay blocking and one call sends a blob.
Does not know: what a blob is (`store.py` does).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time

import msgspec

from moorage.core.errors import PayloadError
from moorage.core.log import get_logger
from moorage.payload.http import (
    HEAD_END,
    MAX_HEAD_BYTES,
    Refused,
    Request,
    make_head,
    parse_head,
    parse_range,
)
from moorage.payload.mappings import Freed
from moorage.payload.store import Damaged, Store
from moorage.records.payload import HOLDERS

log = get_logger(__name__)

_SEND_BYTES = 1 << 30


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /release`."""

    ids: list[str]
    by: str


class Limits(msgspec.Struct, frozen=True):
    """What the service grants a peer."""

    max_connections: int = 512
    idle_timeout_s: float = 120.0
    head_timeout_s: float = 10.0
    send_timeout_s: float = 60.0


class PayloadListener:
    """Accepts on a listening socket until `close()`."""

    def __init__(
        self, store: Store, listener: socket.socket, token: str, limits: Limits | None = None
    ) -> None:
        self.store = store
        self.limits = limits or Limits()
        self._listener = listener
        self._expected = b"Bearer " + token.encode()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False

    def serve(self) -> None:
        """Accept until closed. Runs in the caller's thread."""
        while not self._closing:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("accept failed: %s", error)  # out of file descriptors: let some close
                time.sleep(0.05)
                continue
            with self._lock:
                full = len(self._connections) >= self.limits.max_connections
                if not full:
                    self._connections.add(peer)
            if full:
                self._turn_away(peer)
            else:
                threading.Thread(target=self._run, args=(peer,), name="payload-peer", daemon=True).start()

    def _turn_away(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            peer.setblocking(False)
            text = b"too many connections"
            peer.send(make_head(503, len(text), keep_alive=False, extra="Retry-After: 1\r\n") + text)
            peer.shutdown(socket.SHUT_WR)

    def _run(self, peer: socket.socket) -> None:
        try:
            peer.setblocking(True)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_timeout(peer, socket.SO_SNDTIMEO, self.limits.send_timeout_s)
            rest = b""
            alive = True
            while alive and not self._closing:
                try:
                    head, rest = self._read_head(peer, rest)
                    if head is None:
                        return
                    request = parse_head(head)
                    self._authorize(request)
                    body, rest = self._read_body(peer, request, rest)
                    alive = self._answer(peer, request, body)
                except Refused as refusal:
                    send_text(peer, refusal.status, str(refusal), keep_alive=False)
                    return
        except (OSError, Freed):
            pass  # the peer went away or stood still, or its blob was freed: all that is left is to close
        except Exception:  # one bad connection must not end the service
            log.exception("payload connection failed")
        finally:
            with self._lock:
                self._connections.discard(peer)
            peer.close()

    def _read_head(self, peer: socket.socket, data: bytes) -> tuple[bytes | None, bytes]:
        set_timeout(peer, socket.SO_RCVTIMEO, self.limits.idle_timeout_s)
        deadline = None
        while HEAD_END not in data:
            if len(data) > MAX_HEAD_BYTES:
                raise Refused(431, f"a request head may have {MAX_HEAD_BYTES} bytes")
            if data and deadline is None:
                deadline = time.monotonic() + self.limits.head_timeout_s
                set_timeout(peer, socket.SO_RCVTIMEO, self.limits.head_timeout_s)
            if deadline is not None and time.monotonic() > deadline:
                raise Refused(408, "the request head did not arrive in time")
            chunk = peer.recv(65536)
            if not chunk:
                return None, b""
            data += chunk
        head, _, rest = data.partition(HEAD_END)
        if len(head) > MAX_HEAD_BYTES:
            raise Refused(431, f"a request head may have {MAX_HEAD_BYTES} bytes")
        return head, rest

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            raise Refused(401, "the bearer token is missing or wrong")

    def _read_body(self, peer: socket.socket, request: Request, data: bytes) -> tuple[bytes, bytes]:
        set_timeout(peer, socket.SO_RCVTIMEO, self.limits.head_timeout_s)
        parts, size = [data], len(data)
        while size < request.body_nbytes:
            chunk = peer.recv(min(1 << 20, request.body_nbytes - size))
            if not chunk:
                raise ConnectionError("the peer closed inside a request body")
            parts.append(chunk)
            size += len(chunk)
        data = b"".join(parts)
        return data[: request.body_nbytes], data[request.body_nbytes :]

    def _answer(self, peer: socket.socket, request: Request, body: bytes) -> bool:
        """Answer one request; whether the connection lives on."""
        alive = request.keep_alive
        try:
            if request.method == "GET" and request.path == "/stats":
                send_json(peer, self._stats(request), alive)
            elif request.method == "GET":
                return self._send_blob(peer, request)
            elif request.method == "DELETE":
                self._delete(peer, request)
            elif request.method == "POST" and request.path == "/release":
                send_json(peer, msgspec.json.encode(self._release(body)), alive)
            else:
                raise Refused(405, f"no route {request.method} {request.path}")
        except PayloadError as error:  # no journal line, no open file just now: the peer tries again
            send_text(peer, 503, str(error), keep_alive=alive)
        return alive

    def _stats(self, request: Request) -> bytes:
        stats = msgspec.to_builtins(self.store.ledger())
        limit = request.query.get("outstanding", "0")
        if limit.isdigit() and int(limit):
            stats["held"] = msgspec.to_builtins(self.store.outstanding(int(limit)))
        return msgspec.json.encode(stats)

    def _send_blob(self, peer: socket.socket, request: Request) -> bool:
        blob_id = request.path.lstrip("/")
        try:
            blob = self.store.open(blob_id)
        except Damaged as damage:
            log.error("%s", damage)
            send_text(peer, 410, str(damage), keep_alive=request.keep_alive)
            return request.keep_alive
        if blob is None:
            send_text(peer, 404, f"no payload {blob_id} is kept here", keep_alive=request.keep_alive)
            return request.keep_alive
        size = blob.nbytes
        try:
            part = parse_range(request.headers.get("range"), size)
            start, stop = part or (0, size)
            extra = (
                f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n" if part else "Accept-Ranges: bytes\r\n"
            )
            head = make_head(206 if part else 200, stop - start, keep_alive=request.keep_alive, extra=extra)
            peer.sendall(head, socket.MSG_MORE)
            if blob.memory is None:
                send_file(peer, blob.fd, start, stop)
            else:
                for piece in blob.pieces(start, stop):
                    peer.sendall(piece)
        finally:
            os.close(blob.fd)
        return request.keep_alive

    def _delete(self, peer: socket.socket, request: Request) -> None:
        blob_id = request.path.lstrip("/")
        released = self.store.free([blob_id], _holder(request.query.get("by", "")))
        if released.unknown:
            send_text(peer, 404, f"no payload {blob_id} was kept here", keep_alive=request.keep_alive)
        else:
            peer.sendall(make_head(204, None, keep_alive=request.keep_alive))

    def _release(self, body: bytes) -> object:
        try:
            order = msgspec.json.decode(body, type=ReleaseBody)
        except msgspec.MsgspecError as error:
            raise Refused(400, f"body of /release: {error}") from None
        return self.store.free(order.ids, _holder(order.by))

    def close(self) -> None:
        """Stop accepting and end all connections."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            peers = list(self._connections)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


def _holder(name: str) -> str:
    if name not in HOLDERS:
        raise Refused(400, f"holder {name!r} is not one of {', '.join(HOLDERS)}")
    return name


def send_file(peer: socket.socket, fd: int, start: int, stop: int) -> None:
    """Bytes `start:stop` of a file, by the kernel. Raises OSError when the peer or the file ends early."""
    while start < stop:
        sent = os.sendfile(peer.fileno(), fd, start, min(_SEND_BYTES, stop - start))
        if sent == 0:
            raise ConnectionError("payload file ended while it was sent")
        start += sent


def send_text(peer: socket.socket, status: int, text: str, *, keep_alive: bool) -> None:
    body = text.encode()
    peer.sendall(
        make_head(status, len(body), keep_alive=keep_alive, extra="Content-Type: text/plain\r\n") + body
    )


def send_json(peer: socket.socket, body: bytes, keep_alive: bool) -> None:
    peer.sendall(
        make_head(200, len(body), keep_alive=keep_alive, extra="Content-Type: application/json\r\n") + body
    )


def set_timeout(peer: socket.socket, option: int, timeout_s: float) -> None:
    """Have the kernel give up a blocking call on `peer` after `timeout_s` (it raises BlockingIOError)."""
    whole = max(0, int(timeout_s))
    micro = int((max(timeout_s, 0.001) - whole) * 1e6)
    peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micro))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("" if host == "*" else host, port))
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener
