"""As much of HTTP/1.1 as the payload service speaks: request heads, ranges, answers. No sockets here.

`parse_head` is strict where leniency would be unsafe (sizes, counts, unknown framing) and ignores the rest.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 64
MAX_BODY_BYTES = 4 * 1024 * 1024
HEAD_END = b"\r\n\r\n"

_REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    410: "Gone",
    413: "Content Too Large",
    416: "Range Not Satisfiable",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Refused(Exception):
    """The request is answered with `status` and the message, and the connection closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body_nbytes: int
    keep_alive: bool


def parse_head(head: bytes) -> Request:
    """A request from its head, without the final blank line. Raises Refused."""
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Refused(400, "not an HTTP/1.1 request line")
    if len(lines) > MAX_HEADERS + 1:
        raise Refused(431, f"more than {MAX_HEADERS} header lines")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise Refused(400, "malformed header line")
        if name.lower() in headers and name.lower() in ("content-length", "authorization"):
            raise Refused(400, f"repeated header {name.lower()}")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise Refused(400, "send a Content-Length, not a Transfer-Encoding")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise Refused(400, "Content-Length is not a number")
    if int(length) > MAX_BODY_BYTES:
        raise Refused(413, f"a body may have {MAX_BODY_BYTES} bytes")
    url = urlsplit(parts[1])
    alive = headers.get("connection", "").lower()
    return Request(
        parts[0],
        unquote(url.path),
        dict(parse_qsl(url.query)),
        headers,
        int(length),
        alive == "keep-alive" if parts[2] == "HTTP/1.0" else alive != "close",
    )


def parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """(first byte, one past the last) of a single byte range; None when the whole is to be sent.

    What is not one plain range is ignored, as HTTP allows. Raises Refused(416) when it lies outside.
    """
    if value is None or not value.startswith("bytes=") or "," in value:
        return None
    first, dash, last = value[6:].strip().partition("-")
    if not dash or not (first + last).isdigit():
        return None
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
    if start >= stop:
        raise Refused(416, f"range {value} lies outside the {size} bytes there are")
    return start, stop


def make_head(status: int, length: int | None, *, keep_alive: bool = True, extra: str = "") -> bytes:
    """The head of an answer; `extra` are whole header lines."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    connection = "keep-alive" if keep_alive else "close"
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{size}Connection: {connection}\r\n{extra}\r\n".encode(
        "latin-1"
    )
