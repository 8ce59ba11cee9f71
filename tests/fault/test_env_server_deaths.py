"""Kill and stop the parts of an env server: every call is answered, every payload freed (R5, R35)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moorage.core.errors import EnvServerError
from moorage.env.client import EnvClient
from moorage.env.replicas import Replicas
from tests.support.env_server import RUN_ID, TOKEN, Server, call, env_server
from tests.support.scripted_engine import Reply, ScriptedEngine


async def outcome(run: Any) -> str:
    """`ok`, or the kind of error."""
    try:
        await run
    except EnvServerError as error:
        return error.kind
    return "ok"


async def until(condition: Any, timeout_s: float, what: str) -> float:
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - started


def child_of(server: Server, word: str) -> psutil.Process:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if word in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no process with {word!r}")


def test_workers_and_payload_service_die_and_come_back(tmp_path: Path, dense_model: Path) -> None:
    with (
        ScriptedEngine(lambda _: Reply("yes"), dense_model) as engine,
        env_server(tmp_path, dense_model, num_workers=2) as server,
    ):

        async def run() -> None:
            async with server.client() as client:
                await client.connect(30)
                await until_workers(client, 2)
                await a_killed_worker(server, client)
                await a_stopped_worker(server, client)
                await a_killed_payload_service(server, client, engine)
                await client.bye()

        asyncio.run(asyncio.wait_for(run(), 110))
        assert server.stop() == 0
        assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]


async def until_workers(client: EnvClient, count: int, timeout_s: float = 30) -> float:
    async def ready() -> bool:
        return (await client.ping()).load["workers"] == count

    return await until(ready, timeout_s, f"{count} workers")


async def a_killed_worker(server: Server, client: EnvClient) -> None:
    """16 runs in flight on it: 16 answers within 2 s; the others go on; a new worker serves within 5 s."""
    runs = [asyncio.create_task(outcome(client.run_rollout(call("sleep", 8)))) for _ in range(32)]
    await asyncio.sleep(1)
    assert (await client.ping()).load["running"] == 32
    victim = server.worker_pids()[0]
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(2)
    early = [run.result() for run in runs if run.done()]
    assert early == ["worker_died"] * 16
    assert await until_workers(client, 2) < 3
    assert sorted(await asyncio.gather(*runs)) == ["ok"] * 16 + ["worker_died"] * 16
    load = (await client.ping()).load
    assert load["worker_deaths"] == 1
    assert await outcome(client.run_rollout(call())) == "ok"


async def a_stopped_worker(server: Server, client: EnvClient) -> None:
    """A worker that stands still is killed when one of its runs is past its deadline, and answered for."""
    runs = [
        asyncio.create_task(outcome(client.run_rollout(call("sleep", 60, deadline_s=6)))) for _ in range(4)
    ]
    longer = [asyncio.create_task(outcome(client.run_rollout(call("sleep", 12)))) for _ in range(4)]
    await asyncio.sleep(0.5)
    os.kill(server.worker_pids()[0], signal.SIGSTOP)
    started = time.monotonic()
    assert await asyncio.gather(*runs) == ["deadline"] * 4
    assert time.monotonic() - started < 9
    assert sorted(await asyncio.gather(*longer)) == ["ok", "ok", "worker_died", "worker_died"]
    await until_workers(client, 2)


async def a_killed_payload_service(server: Server, client: EnvClient, engine: ScriptedEngine) -> None:
    child_of(server, "moorage.payload.server").kill()

    async def restarted() -> bool:
        return (await client.ping()).load["payload_restarts"] == 1

    await until(restarted, 30, "a new payload service")
    episode = await client.run_rollout(call("talk", endpoint=engine.url))
    assert episode.ok, episode.errors


def test_a_server_that_is_killed_ends_every_call_with_an_error_that_names_it(
    tmp_path: Path, dense_model: Path
) -> None:
    with env_server(tmp_path, dense_model) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)

        async def run() -> None:
            async with server.client() as client:
                await client.connect(30)
                runs = [asyncio.create_task(client.run_rollout(call("sleep", 60))) for _ in range(8)]
                await asyncio.sleep(1)
                server.process.kill()
                started = time.monotonic()
                for result in await asyncio.gather(*runs, return_exceptions=True):
                    assert isinstance(result, EnvServerError)
                    assert result.kind == "unreachable"
                    assert server.rpc in str(result)
                assert time.monotonic() - started < 15
                with pytest.raises(EnvServerError, match="no answer"):
                    await client.run_rollout(call())

        asyncio.run(asyncio.wait_for(run(), 60))
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, "processes outlive their server"


def test_the_third_death_within_a_minute_stops_the_server_with_its_last_error(
    tmp_path: Path, dense_model: Path
) -> None:
    with env_server(tmp_path, dense_model) as server:

        async def run() -> None:
            async with server.client() as client:
                await client.connect(30)
                kinds = [await outcome(client.run_rollout(call("exit"))) for _ in range(3)]
                assert kinds == ["worker_died"] * 3

        asyncio.run(asyncio.wait_for(run(), 60))
        assert server.process.wait(30) == 1
        assert "three workers died within a minute" in server.log.read_text()
        assert "exit code 3" in server.log.read_text()


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path, dense_model: Path) -> None:
    with env_server(tmp_path, dense_model) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)

        async def run() -> None:
            async with server.client() as client:
                await client.connect(30)
                short = asyncio.create_task(outcome(client.run_rollout(call("sleep", 2))))
                long = asyncio.create_task(outcome(client.run_rollout(call("sleep", 100))))
                await asyncio.sleep(0.5)
                server.process.terminate()
                await asyncio.sleep(0.5)
                assert await outcome(client.run_rollout(call())) == "server_stopping"
                assert await short == "ok"
                assert await long == "server_stopping"

        asyncio.run(asyncio.wait_for(run(), 60))
        assert server.process.wait(30) == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
        assert not list((tmp_path / "envs").rglob("*.address"))
        assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_newer_attempt_takes_over_from_a_running_one(tmp_path: Path, dense_model: Path) -> None:
    with (
        ScriptedEngine(lambda _: Reply("yes"), dense_model) as engine,
        env_server(tmp_path, dense_model) as server,
    ):

        async def run() -> None:
            async with server.client() as old, server.client(attempt=2) as new:
                await old.connect(30)
                first = await old.sample("train/nothing")
                talks = [old.run_rollout(call("talk", endpoint=engine.url)) for _ in range(3)]
                owned = await asyncio.gather(*talks)
                adopted = owned[0].traces[0].info["moorage_payload"]["branches"][0]["id"]
                running = asyncio.create_task(outcome(old.run_rollout(call("sleep", 60))))
                await asyncio.sleep(0.3)
                await new.connect(30, adopt=[adopted])
                assert await running == "cancelled"
                ledger = (await new.ping()).ledger
                assert ledger is not None
                assert (ledger.kept, ledger.outstanding) == (1, 1)
                assert (await new.sample("train/nothing")).task == first.task
                with pytest.raises(EnvServerError, match="attempt 2 has taken over"):
                    await old.sample("train/nothing")

        asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dead_replica_is_passed_over_and_its_stream_goes_on(tmp_path: Path, dense_model: Path) -> None:
    with (
        env_server(tmp_path / "a", dense_model) as first,
        env_server(tmp_path / "b", dense_model) as second,
    ):

        async def run() -> None:
            replicas = Replicas([first.client(), second.client()])
            await replicas.connect(30)
            served = [(await replicas.sample("train/nothing")).task["data"]["idx"] for _ in range(20)]
            runs = [asyncio.create_task(outcome(replicas.run_rollout(call("sleep", 20)))) for _ in range(8)]
            await asyncio.sleep(0.5)
            assert [client.in_flight for client in replicas.clients] == [4, 4]
            first.process.kill()
            served += [(await replicas.sample("train/nothing")).task["data"]["idx"] for _ in range(30)]
            assert sorted(served) == list(range(50))
            assert await outcome(replicas.run_rollout(call())) == "ok"
            assert sorted(await asyncio.gather(*runs)) == ["ok"] * 4 + ["unreachable"] * 4
            assert replicas.in_flight == 0
            await replicas.close()

        asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_silent_holder_loses_its_lease_and_what_it_did_not_acknowledge(
    tmp_path: Path, dense_model: Path
) -> None:
    """A client stopped for longer than a lease wakes, finds its run cancelled, and goes on."""
    with env_server(tmp_path, dense_model) as server:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        peer = context.Process(target=_sleepy_peer, args=(server.rpc, theirs), daemon=True)
        peer.start()
        try:
            assert ours.poll(60)
            assert ours.recv() == "running"
            os.kill(peer.pid, signal.SIGSTOP)
            time.sleep(34)
            os.kill(peer.pid, signal.SIGCONT)
            assert ours.poll(40)
            assert ours.recv() == ("cancelled", "ok")
        finally:
            peer.kill()
        assert "loses its lease" in server.log.read_text()


def _sleepy_peer(address: str, pipe: Any) -> None:
    async def run() -> None:
        async with EnvClient(
            address, token=TOKEN, run_id=RUN_ID, attempt=1, source="train/nothing"
        ) as client:
            await client.connect(30)
            run = asyncio.create_task(outcome(client.run_rollout(call("sleep", 100, deadline_s=200))))
            await asyncio.sleep(0.5)
            pipe.send("running")
            first = await run
            await asyncio.sleep(6)
            pipe.send((first, await outcome(client.run_rollout(call()))))

    asyncio.run(run())
