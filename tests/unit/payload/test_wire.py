"""Answers of every size arrive whole, however they trickle in, and every read ends by its deadline."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.payload.wire import Address, Connection

MIB = 1 << 20
HEAD = "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: keep-alive\r\n\r\n"
SIZES = st.one_of(st.integers(0, 5 * MIB), *(st.integers(n * MIB - 2, n * MIB + 2) for n in (1, 2, 3)))


def make_body(nbytes: int) -> bytes:
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8).tobytes()


class Answerer:
    """Answers every request on one connection with what `answer(peer)` sends."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            while peer.recv(65536):
                self._answer(peer)

    def connect(self) -> Connection:
        return Connection(
            Address("127.0.0.1", self._listener.getsockname()[1]), "token", time.monotonic() + 10
        )

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)


@given(sizes=st.lists(SIZES, min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_answers_of_every_size_arrive_whole_one_after_the_other(sizes, seed) -> None:
    """In pieces of any size; a read must not wait for more bytes than are to come."""
    rng, waiting = random.Random(seed), list(sizes)

    def answer(peer: socket.socket) -> None:
        body = make_body(waiting.pop(0))
        data = HEAD.format(len(body)).encode() + body
        while data:
            count = rng.choice([100, 4096, 100_000, MIB, 3 * MIB])
            peer.sendall(data[:count])
            data = data[count:]

    answerer = Answerer(answer)
    connection = answerer.connect()
    for size in sizes:
        target = np.zeros(size, np.uint8)
        connection.read_into("/x", target, time.monotonic() + 10)
        assert target.tobytes() == make_body(size)
    connection.close()
    answerer.close()


def test_a_large_answer_that_comes_in_drops_is_read_to_its_end() -> None:
    """Fewer bytes at a time than the kernel is asked to wait for."""
    size = 2 * MIB + 5

    def answer(peer: socket.socket) -> None:
        body = make_body(size)
        peer.sendall(HEAD.format(size).encode())
        for start in range(0, size, 300_000):
            peer.sendall(body[start : start + 300_000])
            time.sleep(0.02)

    answerer = Answerer(answer)
    connection = answerer.connect()
    target = connection.read_into("/x", np.zeros(size, np.uint8), time.monotonic() + 10)
    assert target.tobytes() == make_body(size)
    connection.close()
    answerer.close()


@pytest.mark.parametrize("sent", [0, 10, MIB - 1, MIB + 1, 2 * MIB])
def test_an_answer_that_stands_still_ends_by_the_deadline(sent) -> None:
    answerer = Answerer(lambda peer: peer.sendall(HEAD.format(3 * MIB).encode() + make_body(sent)))
    connection = answerer.connect()
    begun = time.monotonic()
    with pytest.raises(OSError):  # noqa: PT011 - BlockingIOError or TimeoutError, as the moment has it
        connection.read_into("/x", np.zeros(3 * MIB, np.uint8), begun + 0.5)
    assert 0.4 < time.monotonic() - begun < 5
    connection.close()
    answerer.close()


@pytest.mark.parametrize("sent", [0, 10, MIB - 1, MIB + 1, 2 * MIB, 3 * MIB - 1])
def test_an_answer_that_ends_short_says_after_how_many_bytes(sent) -> None:
    def answer(peer: socket.socket) -> None:
        peer.sendall(HEAD.format(3 * MIB).encode() + make_body(sent))
        peer.shutdown(socket.SHUT_WR)

    answerer = Answerer(answer)
    connection = answerer.connect()
    with pytest.raises(ConnectionResetError, match=f"after {sent} of {3 * MIB} bytes"):
        connection.read_into("/x", np.zeros(3 * MIB, np.uint8), time.monotonic() + 10)
    connection.close()
    answerer.close()


def test_an_interrupted_read_ends_at_once() -> None:
    answerer = Answerer(lambda peer: peer.sendall(HEAD.format(3 * MIB).encode() + make_body(MIB // 2)))
    connection = answerer.connect()
    threading.Timer(0.2, connection.interrupt).start()
    begun = time.monotonic()
    with pytest.raises(OSError):  # noqa: PT011
        connection.read_into("/x", np.zeros(3 * MIB, np.uint8), begun + 30)
    assert time.monotonic() - begun < 5
    connection.close()
    answerer.close()
