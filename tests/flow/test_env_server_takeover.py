"""An env server that lives on: nothing of an attempt or run is left for the next one (R28)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.core.errors import EnvServerError
from moorage.env.client import EnvClient
from moorage.launcher.farewell import Identity, Station, say_bye
from moorage.records.payload import Ledger
from tests.support.env_server import TOKEN, Server, call, env_server
from tests.support.scripted_engine import EngineSettings, Reply, ScriptedEngine

LEASE_S = 2.5
STREAM = "train/nothing"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, dense_model: Path) -> Iterator[Server]:
    """A server that somebody else runs: it belongs to no run."""
    folder = tmp_path_factory.mktemp("takeover")
    with env_server(folder, dense_model, run_id="", lease_s=LEASE_S) as server:
        yield server


@pytest.fixture(scope="module")
def engine(dense_model: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: Reply("yes"), dense_model) as engine:
        yield engine


@asynccontextmanager
async def connected(server: Server, run_id: str, attempt: int, adopt: tuple[str, ...] = (), **who: Any):
    async with server.client(run_id=run_id, attempt=attempt, **who) as client:
        await client.connect(10, adopt)
        yield client


async def talk(client: EnvClient, engine: ScriptedEngine) -> str:
    """One episode; the id of its payload, which is ours from then on."""
    episode = await client.run_rollout(call("talk", endpoint=engine.url))
    assert episode.ok, episode.errors
    return episode.traces[0].info["moorage_payload"]["branches"][0]["id"]


async def served(client: EnvClient, count: int, limit: int | None = None) -> list[int]:
    return [task_number((await client.sample(STREAM, limit)).task) for _ in range(count)]


def task_number(task: dict[str, Any]) -> int:
    return task["data"]["idx"]


async def account(client: EnvClient) -> tuple[int, int, int]:
    """(kept, freed by the server, outstanding), as old as the last answer."""
    ledger = (await client.ping()).ledger
    assert isinstance(ledger, Ledger)
    return ledger.kept, ledger.freed["env_server"], ledger.outstanding


async def lease_is_lost(server: Server, run_id: str, attempt: int) -> None:
    deadline = time.monotonic() + 10
    while f"run '{run_id}' attempt {attempt} ({STREAM}) has been silent" not in server.log.read_text():
        assert time.monotonic() < deadline, "the lease lives on"
        await asyncio.sleep(0.05)


def go(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_an_attempt_that_comes_after_the_lease_was_lost_finds_a_clean_server(
    server: Server, engine: ScriptedEngine
) -> None:
    async def run() -> None:
        async with connected(server, "crashed", 1) as first:
            order = await served(first, 3)
            blobs = [await talk(first, engine) for _ in range(3)]
            assert await account(first) == (3, 0, 3)
        await lease_is_lost(server, "crashed", 1)
        async with connected(server, "crashed", 2, (blobs[0],)) as second:
            assert await account(second) == (1, 0, 1), "the adopted one, of nobody else's account"
            assert await served(second, 3) == order, "its stream begins at the start"
            mine = await talk(second, engine)
            async with connected(server, "crashed", 2, (blobs[0],), source="eval/nothing"):
                assert await served(second, 1) != order[:1], "another source of the attempt ends nothing"
                await asyncio.sleep(1.0)
                assert await account(second) == (2, 0, 2)
                with pytest.raises(EnvServerError, match="attempt 2 has taken over"):
                    async with connected(server, "crashed", 1):
                        pass
            assert await account(second) == (2, 0, 2), mine
            await second.bye()

    go(run())


def test_after_bye_the_next_run_begins_at_the_start(server: Server, engine: ScriptedEngine) -> None:
    async def run() -> None:
        async with connected(server, "interrupted", 1) as first:
            order = await served(first, 4, limit=10)
            await talk(first, engine)
            await first.bye()
        async with connected(server, "again", 1) as second:
            assert (await second.ping()).load["streams"] == 0
            assert await served(second, 4) == order, "neither the cursor nor the limit is the other run's"
            assert (await account(second))[2] == 0
            await second.bye()

    go(run())


def test_the_next_run_may_have_another_engine_at_the_same_address(server: Server, dense_model: Path) -> None:
    settings = EngineSettings(max_model_len=2)

    async def run(engine: ScriptedEngine) -> None:
        async with connected(server, "short", 1) as first:
            await first.run_rollout(call("talk", endpoint=engine.url))
            assert not engine.seen, "the prompt is too long for it"
            await first.bye()
        engine.settings = EngineSettings()
        async with connected(server, "long", 1) as second:
            await talk(second, engine)
            await second.bye()

    with ScriptedEngine(lambda _: Reply("yes"), dense_model, settings) as engine:
        go(run(engine))


def test_a_run_that_was_taken_over_from_is_told_so_when_it_comes_back(server: Server) -> None:
    async def run() -> None:
        async with connected(server, "frozen", 1) as first:
            order = await served(first, 2)
        await lease_is_lost(server, "frozen", 1)
        async with connected(server, "other", 1) as second:
            assert await served(second, 2) == order
            with pytest.raises(EnvServerError, match="out of date"):
                async with connected(server, "frozen", 1):
                    pass
            station = Station(STREAM, STREAM, server.rpc)
            assert say_bye([station], Identity(TOKEN, "frozen", 1)) == {STREAM: None}, "nor may it end it"
            assert await served(second, 2) != order
            await second.bye()
        with pytest.raises(EnvServerError, match=r"out of date: .* run 'other' attempt 1 .* has taken over"):
            async with connected(server, "frozen", 1):
                pass
        async with connected(server, "frozen", 2) as third:
            assert await served(third, 2) == order
            await third.bye()

    go(run())


def test_nobody_is_let_in_before_the_earlier_attempt_is_cleared_away(
    server: Server, engine: ScriptedEngine
) -> None:
    """A run of the old attempt takes its time to end: what a second source keeps meanwhile has to survive."""

    async def run() -> None:
        async with connected(server, "slow", 1) as first:
            deaf = asyncio.create_task(first.run_rollout(call("deaf", 1.5)))
            await asyncio.sleep(0.3)
            async with (
                server.client(run_id="slow", attempt=2) as second,
                server.client(run_id="slow", attempt=2, source="eval/nothing") as third,
            ):
                hello = asyncio.create_task(second.connect(10))
                await asyncio.sleep(0.3)
                await third.connect(10)
                await talk(third, engine)
                await hello
                await asyncio.sleep(1.0)
                assert await account(second) == (1, 0, 1)
                await second.bye()
            with pytest.raises(EnvServerError, match="taken over"):
                await deaf

    go(run())


def test_an_endless_stream_begins_at_the_start_though_calls_for_it_were_waiting(
    tmp_path: Path, dense_model: Path
) -> None:
    async def run(server: Server) -> None:
        async with connected(server, "first", 1) as first, server.client(run_id="first", attempt=2) as second:
            waiting = [asyncio.create_task(first.restore(STREAM, 0, 10_000 + n)) for n in range(3)]
            await asyncio.sleep(0.05)
            await second.connect(10)
            assert await served(second, 3) == [0, 1, 2]
            await asyncio.gather(*waiting, return_exceptions=True)
            assert await served(second, 2) == [3, 4]

    with env_server(
        tmp_path, dense_model, run_id="", num_tasks=None, lease_s=LEASE_S, num_workers=1
    ) as server:
        go(run(server))
