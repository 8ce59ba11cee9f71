"""A real env server with two workers: tasks, groups, cancels, refusals, cuts (R22, R23, R26, R34)."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire
from moorage.env.client import EnvClient
from moorage.env.environment import describe
from moorage.env.keep import read_payload
from moorage.orchestrator.events import check_task
from moorage.orchestrator.groups import Group
from moorage.payload.client import PayloadClient
from moorage.records.payload import PayloadRef
from tests.support.env_server import RUN_ID, TOKEN, Server, call, env_server
from tests.support.envs.do_nothing import DoNothingData, DoNothingTask
from tests.support.proxy import Proxy
from tests.support.scripted_engine import Reply, ScriptedEngine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, dense_model: Path) -> Iterator[Server]:
    with env_server(tmp_path_factory.mktemp("serving"), dense_model, num_workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def engine(dense_model: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: Reply("yes", delay_s=0.02), dense_model) as engine:
        yield engine


def with_client(server: Server, body: Callable[[EnvClient], Awaitable[Any]], **who: Any) -> Any:
    async def run() -> Any:
        async with server.client(**who) as client:
            await client.connect(30)
            return await body(client)

    return asyncio.run(asyncio.wait_for(run(), 100))


def ask(server: Server, *frames: bytes, timeout_s: float = 10.0, identity: bytes = b"") -> list[bytes]:
    """Send frames as a foreign peer and return the answer."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if identity:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(server.rpc)
        socket.send_multipart(frames)
        assert socket.poll(int(timeout_s * 1000)), "no answer"
        return socket.recv_multipart()
    finally:
        context.destroy(linger=0)


def body(**fields: Any) -> bytes:
    who = {"token": TOKEN, "run_id": RUN_ID, "attempt": 1, "source": "train/nothing"}
    return msgspec.msgpack.encode({**who, **fields})


def refusal(server: Server, method: bytes, data: bytes) -> EnvServerError:
    frames = ask(server, b"q1", method, data)
    assert frames[:2] == [b"q1", b"error"]
    return wire.decode_error(frames[2])


def test_eight_groups_are_eight_distinct_tasks_over_two_workers(server: Server) -> None:
    async def step(client: EnvClient) -> None:
        tasks = [await client.sample("train/nothing@groups") for _ in range(8)]
        assert len({task.task["data"]["idx"] for task in tasks}) == 8
        run = call()
        episodes = await asyncio.gather(
            *(client.run_rollout(replace(run, task=task.task)) for task in tasks for _ in range(4))
        )
        counts = Counter(episode.task.data.idx for episode in episodes)
        assert counts == Counter({task.task["data"]["idx"]: 4 for task in tasks})
        assert all(episode.ok for episode in episodes)

    with_client(server, step)


def test_three_epochs_serve_every_task_three_times_and_restore_continues(server: Server) -> None:
    async def epochs(client: EnvClient) -> None:
        name = f"train/nothing@{uuid.uuid4().hex}"
        served = [await client.sample(name) for _ in range(150)]
        orders = [tuple(s.task["data"]["idx"] for s in served[e * 50 : e * 50 + 50]) for e in range(3)]
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert len(set(orders)) == 3
        again = f"train/nothing@{uuid.uuid4().hex}"
        await client.restore(again, served[69].epoch, served[69].position)
        assert [(await client.sample(again)).task["data"]["idx"] for _ in range(80)] == [
            s.task["data"]["idx"] for s in served[70:]
        ]

    with_client(server, epochs)


def test_concurrent_samples_share_one_stream(server: Server) -> None:
    async def sample(client: EnvClient) -> list[int]:
        name = f"train/nothing@{uuid.uuid4().hex}"
        return [
            s.task["data"]["idx"] for s in await asyncio.gather(*(client.sample(name) for _ in range(50)))
        ]

    assert sorted(with_client(server, sample)) == list(range(50))


def test_a_group_is_scored_together_and_returned_whole(server: Server) -> None:
    async def groups(client: EnvClient) -> None:
        assert client.hello is not None
        assert client.hello.scores_groups
        episodes = await client.run_group(call(), 3)
        assert [episode.traces[0].rewards["place"].score for episode in episodes] == [0.0, 1.0, 2.0]
        with pytest.raises(EnvServerError, match="this group cannot be scored") as caught:
            await client.run_group(call("raise"), 2)
        assert caught.value.kind == "task_error"

    with_client(server, groups)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("late", r"TimeoutError: the judge took too long$"),
        ("stray", r"CancelledError$"),
        ("crash", r"LookupError: no agent for do$"),
    ],
)
def test_what_goes_wrong_in_a_group_is_said_in_the_environments_own_words(
    server: Server, action: str, message: str
) -> None:
    with pytest.raises(EnvServerError, match=f"^{message}") as caught:
        with_client(server, lambda client: client.run_group(call(action), 3))
    assert caught.value.kind == "task_error"


def test_an_environment_that_raises_is_an_ordinary_result_that_is_not_ok(server: Server) -> None:
    episode = with_client(server, lambda client: client.run_rollout(call("raise")))
    assert not episode.ok
    assert "this task always fails" in episode.traces[0].errors[0].message


def test_a_run_ends_by_its_deadline_even_if_it_cannot_be_cancelled(server: Server) -> None:
    async def late(client: EnvClient) -> None:
        for action in ("sleep", "deaf"):
            started = time.monotonic()
            with pytest.raises(EnvServerError) as caught:
                await client.run_rollout(call(action, 4.0, deadline_s=1.0))
            assert caught.value.kind == "deadline"
            assert time.monotonic() - started < 4.0

    with_client(server, late)


def test_an_episode_of_another_task_than_was_asked_for_is_noticed(server: Server) -> None:
    swap = describe(DoNothingTask(DoNothingData(prompt="do", action="swap")))

    async def run(client: EnvClient) -> None:
        fine = (await client.sample("train/nothing@asked")).task
        for task in (fine, msgspec.to_builtins(swap)):
            [episode] = await client.run_group(replace(call(), task=task), 1)
            assert episode.ok, episode.errors
            group = Group("g", "train", "nothing", task, 1, 0, 1, True, 0.0, 60.0)
            if task is fine:
                check_task(group, episode)
            else:
                with pytest.raises(EnvServerError, match=r"sent task key .* answers for"):
                    check_task(group, episode)

    with_client(server, run)


def test_a_task_that_does_not_fit_is_a_bad_request(server: Server) -> None:
    with pytest.raises(EnvServerError, match="seconds") as caught:
        with_client(server, lambda client: client.run_rollout(call(seconds="soon")))  # type: ignore[arg-type]
    assert caught.value.kind == "bad_request"


def test_cancelling_the_caller_ends_the_run(server: Server) -> None:
    async def cancel(client: EnvClient) -> None:
        task = asyncio.create_task(client.run_rollout(call("sleep", 60)))
        await asyncio.sleep(0.3)
        assert (await client.ping()).load["running"] == 1
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 3
        ping = await client.ping()
        assert (ping.load["running"], ping.in_flight, client.in_flight) == (0, 0, 0)

    with_client(server, cancel)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_cancelling_at_random_moments_leaves_nothing_behind(
    server: Server, engine: ScriptedEngine, count: int
) -> None:
    """Half of the calls are cancelled while they are asked for, run, kept, replied to or acknowledged."""
    rng = random.Random(1)

    async def storm(client: EnvClient) -> None:
        payloads = PayloadClient(TOKEN, connections=2)
        owned: list[Any] = []

        async def one() -> str:
            task = asyncio.create_task(client.run_rollout(call("talk", endpoint=engine.url)))
            if rng.random() < 0.7:
                await asyncio.sleep(rng.random() ** 2 * count / 100)
                task.cancel()
            try:
                owned.append(await task)
            except asyncio.CancelledError:
                return "cancelled"
            return "done"

        outcomes = Counter(await asyncio.gather(*(one() for _ in range(count))))
        assert outcomes["cancelled"] > count / 10
        assert outcomes["done"] > count / 10
        await asyncio.to_thread(payloads.release, references(owned), "train_sink")
        await asyncio.to_thread(payloads.release, references(client.take_abandoned()), "dispatcher")
        assert not payloads.pending_releases
        payloads.close()
        await settled(client)
        ledger = (await client.ping()).ledger
        assert ledger is not None
        assert (ledger.outstanding, ledger.double_frees, ledger.unknown) == (0, 0, 0)
        assert ledger.kept == sum(ledger.freed.values())
        assert ledger.freed["train_sink"] > 0

    with_client(server, storm)
    deadline = time.monotonic() + 5  # a file goes a moment after the ledger says so
    while blobs_left(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not blobs_left(server)


def blobs_left(server: Server) -> list[str]:
    """Blobs and temporary files in the spool."""
    names = [name for _, _, files in os.walk(server.folder / "spool") for name in files]
    return [name for name in names if name.endswith((".safetensors", ".tmp"))]


def references(episodes: list[Any]) -> list[PayloadRef]:
    found = [read_payload(trace) for episode in episodes for trace in episode.traces]
    return [PayloadRef(p.url, p.store, branch.id) for p in found if p is not None for branch in p.branches]


async def settled(client: EnvClient) -> None:
    for _ in range(100):
        ping = await client.ping()
        if ping.in_flight == 0 and ping.load["unacknowledged"] == 0 and ping.ledger.outstanding == 0:  # type: ignore[union-attr]
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"not settled: {ping}")


def test_replies_hold_references_and_no_arrays(server: Server, engine: ScriptedEngine) -> None:
    async def talk(client: EnvClient) -> None:
        episode = await client.run_rollout(call("talk", endpoint=engine.url))
        assert episode.ok, episode.errors
        payload = read_payload(episode.traces[0])
        assert payload is not None
        assert payload.branches[0].num_trainable > 0
        assert all(not node.token_ids and not node.logprobs for node in episode.traces[0].nodes)
        ledger = (await client.ping()).ledger
        assert ledger is not None
        with PayloadClient(TOKEN, connections=1) as payloads:
            payloads.release(references([episode]), "train_sink")

    with_client(server, talk)


def test_a_wrong_token_is_refused(server: Server) -> None:
    error = refusal(server, b"ping", body(token="0" * 64))
    assert error.kind == "refused"
    assert "wrong token" in str(error)


def test_a_wrong_version_is_refused_with_both_versions(server: Server) -> None:
    error = refusal(server, b"hello", body(version=99))
    assert "99" in str(error)
    assert str(wire.PROTOCOL_VERSION) in str(error)
    assert refusal(server, b"hello", body(version=99, novelty=1)).kind == "refused"


def test_an_unknown_method_is_refused(server: Server) -> None:
    assert refusal(server, b"dance", body()).kind == "unknown_method"


def test_another_run_and_an_older_attempt_are_refused(server: Server) -> None:
    async def nothing(_: EnvClient) -> None: ...

    with pytest.raises(EnvServerError, match="belongs to run") as caught:
        with_client(server, nothing, run_id="other")
    assert caught.value.kind == "refused"
    with pytest.raises(EnvServerError, match="out of date"):
        with_client(server, nothing, attempt=0)


def test_malformed_frames_are_answered_when_an_id_can_be_read_and_counted(server: Server) -> None:
    async def malformed(client: EnvClient) -> int:
        return (await client.ping()).load["malformed"]

    before = with_client(server, malformed)
    frames = ask(server, b"q1", b"ping", b"x", b"y")
    assert wire.decode_error(frames[2]).kind == "bad_request"
    assert ask(server, b"q2", b"ping", b"\xc1")[:2] == [b"q2", b"error"]
    with pytest.raises(AssertionError, match="no answer"):
        ask(server, b"../../etc", b"ping", body(), timeout_s=0.5)
    with pytest.raises(AssertionError, match="no answer"):
        ask(server, b"alone", timeout_s=0.5)
    assert with_client(server, malformed) == before + 4


def test_a_message_above_the_limit_is_refused_here_and_cut_off_there(server: Server) -> None:
    size = wire.MAX_MESSAGE_BYTES + 1

    async def too_long(client: EnvClient) -> int:
        with pytest.raises(EnvServerError, match=f"above the limit of {wire.MAX_MESSAGE_BYTES}"):
            await client.run_rollout(call(prompt="x" * size))
        return (await client.ping()).load["disconnected"]

    before = with_client(server, too_long)
    memory = psutil.Process(server.process.pid).memory_info().rss
    with pytest.raises(AssertionError, match="no answer"):
        ask(server, b"q1", b"ping", b"x" * size, timeout_s=2)
    assert psutil.Process(server.process.pid).memory_info().rss - memory < 8 << 20
    assert with_client(server, too_long) >= before + 1


def test_a_connection_that_is_cut_loses_no_reply(server: Server) -> None:
    async def run() -> None:
        async with Proxy(server.rpc) as proxy:
            client = EnvClient(proxy.address, token=TOKEN, run_id=RUN_ID, attempt=1, source="train/nothing")
            async with client:
                await client.connect(30)
                calls = [call("sleep", 0.5 + 0.02 * i) for i in range(100)]
                runs = [asyncio.create_task(client.run_rollout(c)) for c in calls]
                for _ in range(4):
                    await asyncio.sleep(0.6)
                    proxy.cut()
                episodes = await asyncio.gather(*runs)
                assert all(episode.ok for episode in episodes)
                assert proxy.connections >= 4

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_lost_reply_and_a_lost_ack_are_found_by_a_ping(server: Server, engine: ScriptedEngine) -> None:
    """A hand-written peer takes its time: the reply comes again, and a late ack still gives ownership."""
    identity = wire.routing_id(RUN_ID, 1, "train/slow-peer")
    who = {"source": "train/slow-peer"}
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.rpc)

    def request(frame_id: bytes, method: bytes, **fields: Any) -> Any:
        socket.send_multipart([frame_id, method, body(**who, **fields)])
        return answer(frame_id)

    def answer(frame_id: bytes) -> Any:
        while True:
            assert socket.poll(10_000), f"no answer to {frame_id!r}"
            frames = socket.recv_multipart()
            if frames[0] == frame_id:
                return msgspec.msgpack.decode(frames[2])

    try:
        request(b"h", b"hello", version=wire.PROTOCOL_VERSION)
        run = call("talk", endpoint=engine.url)
        fields = {name: getattr(run, name) for name in run.__dataclass_fields__}
        episode = request(b"run-1", b"run_rollout", **fields)
        assert episode["ok"]
        time.sleep(2.1)
        socket.send_multipart([b"p1", b"ping", body(**who, open=["run-1"])])
        assert answer(b"run-1") == episode, "the reply is sent again"
        assert answer(b"p1")["unknown"] == []
        assert request(b"a1", b"ack", ids=["run-1"]) == {"owned": ["run-1"], "unknown": []}
        assert request(b"a2", b"ack", ids=["run-1"]) == {"owned": ["run-1"], "unknown": []}
        assert request(b"c1", b"cancel", ids=["run-1"]) == {"live": []}
        assert request(b"p2", b"ping", open=["run-1", "never"])["unknown"] == ["never"]
        assert request(b"p3", b"ping")["ledger"]["outstanding"] == 1
        branch = episode["traces"][0]["info"]["moorage_payload"]["branches"][0]
        url = episode["traces"][0]["info"]["moorage_payload"]["url"]
        with PayloadClient(TOKEN, connections=1) as payloads:
            payloads.release([PayloadRef(url, "s", branch["id"])], "trainer")
        time.sleep(1.1)
        ledger = request(b"p4", b"ping")["ledger"]
        assert (ledger["outstanding"], ledger["double_frees"]) == (0, 0)
    finally:
        context.destroy(linger=0)


def test_more_runs_than_fit_wait_in_the_broker(server: Server) -> None:
    async def flood(client: EnvClient) -> None:
        runs = [asyncio.create_task(client.run_rollout(call("sleep", 1.5))) for _ in range(600)]
        await asyncio.sleep(1.0)
        load = (await client.ping()).load
        assert load["running"] <= 512
        assert load["running"] + load["queued"] == 600
        assert all(episode.ok for episode in await asyncio.gather(*runs))

    with_client(server, flood)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2000, marks=pytest.mark.slow),
        pytest.param(10_000, marks=[pytest.mark.proof, pytest.mark.timeout(900)]),
    ],
)
def test_thousands_of_concurrent_rollouts_have_one_reply_each(
    tmp_path: Path, dense_model: Path, count: int
) -> None:
    with env_server(tmp_path, dense_model, num_workers=2, max_concurrent=count // 2) as server:

        async def all_at_once(client: EnvClient) -> None:
            calls = [call(prompt=f"{i}", deadline_s=600) for i in range(count)]
            episodes = await asyncio.gather(*(client.run_rollout(c) for c in calls))
            assert Counter(e.task.data.prompt for e in episodes) == Counter(str(i) for i in range(count))
            assert len({e.id for e in episodes}) == count

        async def run() -> None:
            async with server.client() as client:
                await client.connect(30)
                await all_at_once(client)

        asyncio.run(asyncio.wait_for(run(), 800))
