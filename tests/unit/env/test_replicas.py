"""One coherent stream over several servers, whichever of them answers (R28)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from moorage.core.errors import EnvServerError
from moorage.env.client import EnvClient, Sampled
from moorage.env.replicas import Replicas
from moorage.env.streams import Streams, permutation

NAME = "train/a"


class Scripted:
    """A server with real streams. `fails`: how the next calls fail: `lost`, or `late` (done, unheard)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.dead: str | None = None
        self.fails: list[str] = []
        self.streams: set[str] = set()
        self._served = Streams(lambda: iter(range(100)), infinite=False, seed=3)

    def _do(self, work: Callable[[], Any]) -> Any:
        how = self.fails.pop(0) if self.fails else ""
        result = None if how == "lost" else work()
        if how:
            raise EnvServerError("unreachable", f"{self.address} did not answer")
        return result

    async def sample(self, stream: str, limit: int | None = None) -> Sampled:
        served = self._do(lambda: self._served.sample(stream, limit))
        self.streams.add(stream)
        return Sampled({"idx": served.task}, served.epoch, served.position)

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> None:
        self._do(lambda: self._served.restore(stream, epoch, position, limit))
        self.streams.add(stream)

    async def close_stream(self, stream: str) -> None:
        self._do(lambda: self._served.close(stream))
        self.streams.discard(stream)


def make(count: int) -> tuple[Replicas, list[Scripted]]:
    servers = [Scripted(f"server {index}") for index in range(count)]
    return Replicas(cast(list[EnvClient], servers)), servers


async def take(replicas: Replicas, count: int) -> list[int]:
    return [(await replicas.sample(NAME)).task["idx"] for _ in range(count)]


ORDER = list(permutation(3, 0, 100))


@pytest.mark.parametrize("how", ["lost", "late"])
def test_a_stream_that_moves_there_and_back_goes_on_where_it_stood(how: str) -> None:
    async def run() -> None:
        replicas, (first, second) = make(2)
        found = await take(replicas, 5)
        first.fails = [how]
        found += await take(replicas, 5)
        second.fails = [how]
        found += await take(replicas, 5)
        assert found == ORDER[:15]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["lost", "late"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_task_whose_answer_is_lost_is_asked_for_again(how: str, before: int) -> None:
    async def run() -> None:
        replicas, (only,) = make(1)
        found = await take(replicas, before)
        only.fails = [how]
        with pytest.raises(EnvServerError):
            await replicas.sample(NAME)
        assert found + await take(replicas, 4) == ORDER[: before + 4]

    asyncio.run(run())


def test_every_server_is_asked_once_before_the_error_is_the_callers() -> None:
    async def run() -> None:
        replicas, servers = make(3)
        found = await take(replicas, 2)
        for server in servers[:2]:
            server.fails = ["lost"]
        found += await take(replicas, 2)
        for server in servers:
            server.fails = ["lost"]
        with pytest.raises(EnvServerError, match="did not answer"):
            await take(replicas, 1)
        assert found + await take(replicas, 2) == ORDER[:6]

    asyncio.run(run())


def test_a_restore_moves_on_with_the_sampler() -> None:
    async def run() -> None:
        replicas, (first, _) = make(2)
        await take(replicas, 2)
        first.fails = ["lost"]
        await replicas.restore(NAME, 0, 20)
        assert await take(replicas, 3) == ORDER[20:23]

    asyncio.run(run())


def test_a_stream_that_was_closed_begins_at_the_start_on_every_server() -> None:
    async def run() -> None:
        replicas, (first, second) = make(2)
        await take(replicas, 2)
        first.fails = ["lost"]
        await take(replicas, 2)
        first.fails = ["lost"]
        with pytest.raises(EnvServerError):
            await replicas.close_stream(NAME)
        second.fails = ["lost"]
        assert await take(replicas, 3) == ORDER[:3]

    asyncio.run(run())
