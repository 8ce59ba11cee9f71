"""Request heads and ranges, as strict as they must be."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.payload.http import MAX_BODY_BYTES, MAX_HEADERS, Refused, make_head, parse_head, parse_range


def test_a_plain_request() -> None:
    request = parse_head(
        b"DELETE /ab?by=trainer HTTP/1.1\r\nHost: x\r\nauthorization:  Bearer t \r\nConnection: close"
    )
    assert (request.method, request.path, request.query) == ("DELETE", "/ab", {"by": "trainer"})
    assert request.headers["authorization"] == "Bearer t"
    assert not request.keep_alive
    assert parse_head(b"GET / HTTP/1.1").keep_alive
    assert not parse_head(b"GET / HTTP/1.0").keep_alive


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /", 400),
        (b"GET / SPDY/1", 400),
        (b"GET / HTTP/1.1\r\nnocolon", 400),
        (b"GET / HTTP/1.1\r\nbad : x", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d" % (MAX_BODY_BYTES + 1), 413),
        (b"GET / HTTP/1.1" + b"\r\nA: b" * (MAX_HEADERS + 1), 431),
    ],
)
def test_what_is_refused(head, status) -> None:
    with pytest.raises(Refused) as refusal:
        parse_head(head)
    assert refusal.value.status == status


@given(st.binary(max_size=300))
def test_noise_is_parsed_or_refused(noise) -> None:
    with contextlib.suppress(Refused):
        parse_head(noise)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=10-", (10, 100)),
        ("bytes=-7", (93, 100)),
        ("bytes=-700", (0, 100)),
        ("bytes=90-900", (90, 100)),
        ("bytes=0-1,5-6", None),
        ("bytes=a-b", None),
        ("items=0-1", None),
        ("bytes=-", None),
    ],
)
def test_ranges(value, expected) -> None:
    assert parse_range(value, 100) == expected


@pytest.mark.parametrize("value", ["bytes=100-", "bytes=5-4", "bytes=-0"])
def test_a_range_outside_is_416(value) -> None:
    with pytest.raises(Refused) as refusal:
        parse_range(value, 100)
    assert refusal.value.status == 416


def test_an_answer_head() -> None:
    head = make_head(206, 5, keep_alive=False, extra="A: b\r\n")
    assert head == b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nConnection: close\r\nA: b\r\n\r\n"
