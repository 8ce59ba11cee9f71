from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moorage.core.errors import EngineError
from moorage.engine.fleet import Fleet
from tests.support.strict_engine import Yard, serve_yard

ROUTES = {
    "pause": ("/pause?mode=keep&clear_cache=true", None),
    "load": ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "x"}}),
    "label": ("/update_weight_version", {"new_version": "1"}),
    "resume": ("/resume", None),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def with_fleet(yard: Yard, act: Callable[[Fleet], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with serve_yard(yard) as urls:
            fleet = Fleet(urls, "policy", **options)
            try:
                return await act(fleet)
            finally:
                await fleet.close()

    return asyncio.run(main())


def test_the_strict_engine_refuses_every_other_order() -> None:
    async def drive(order: tuple[str, ...], replicas_first: bool) -> Yard:
        yard = Yard(num_replicas=2)
        async with serve_yard(yard) as urls, aiohttp.ClientSession() as session:
            steps = [(action, url) for action in order for url in urls]
            if replicas_first:
                steps = [(action, url) for url in urls for action in order]
            for action, url in steps:
                route, body = ROUTES[action]
                async with session.post(url + route, json=body) as answer:
                    await answer.read()
        return yard

    right = ("pause", "load", "label", "resume")
    for order in itertools.permutations(right):
        assert bool(asyncio.run(drive(order, False)).faults) == (order != right), order
    assert asyncio.run(drive(right, True)).faults, "one replica after the other is wrong as well"


def test_an_update_holds_the_one_right_order_over_all_replicas(weights: Path) -> None:
    yard = Yard(num_replicas=3)

    async def act(fleet: Fleet) -> None:
        await fleet.wait_ready(5)
        await fleet.label(0)
        for version in (1, 2):
            await fleet.update_weights(weights, version)
            assert fleet.version == version

    with_fleet(yard, act)
    assert yard.faults == []
    assert yard.label == ["2"] * 3
    assert yard.actions(0) == ["label", *["pause", "load", "label", "resume"] * 2]


def test_stale_work_is_cancelled_and_answered_before_the_first_pause(weights: Path) -> None:
    yard = Yard(num_replicas=2, stale=8)

    async def answered() -> None:
        await asyncio.sleep(0.05)
        yard.stale = 0

    with_fleet(yard, lambda fleet: fleet.update_weights(weights, 1, answered))
    assert yard.faults == []

    yard = Yard(num_replicas=2, stale=8)
    with pytest.raises(EngineError, match="8 stale requests still run"):
        with_fleet(yard, lambda fleet: fleet.update_weights(weights, 1))


def test_keeping_the_cache_is_said_to_the_engine(weights: Path) -> None:
    yard = Yard(clear_cache="false")
    with_fleet(yard, lambda fleet: fleet.update_weights(weights, 1), keep_cache=True)
    assert yard.faults == []


@pytest.mark.parametrize("action", ["pause", "load", "label"])
@pytest.mark.parametrize("kind", ["fail", "hang"])
def test_a_replica_that_fails_a_stage_is_named_and_no_later_stage_begins(
    weights: Path, action: str, kind: str
) -> None:
    yard = Yard(num_replicas=3, **{kind: (1, action)})

    async def act(fleet: Fleet) -> None:
        with pytest.raises(EngineError) as error:
            await fleet.update_weights(weights, 1)
        assert fleet.urls[1] in str(error.value)
        assert fleet.urls[0] not in str(error.value)
        assert "1 of 3 engines failed to" in str(error.value)

    with_fleet(yard, act, control_timeout_s=0.4, load_timeout_s=0.4)
    stages = ["pause", "load", "label"]
    assert yard.actions(0) == [*stages[: stages.index(action) + 1], "resume"]
    assert yard.stage[0] == yard.stage[2] == "serving"


def test_a_replica_that_does_not_resume_is_named(weights: Path) -> None:
    yard = Yard(num_replicas=2, fail=(0, "resume"))

    async def act(fleet: Fleet) -> None:
        with pytest.raises(EngineError, match="failed to resume") as error:
            await fleet.update_weights(weights, 1)
        assert fleet.urls[0] in str(error.value)

    with_fleet(yard, act)


def test_an_update_that_is_cancelled_resumes_what_it_paused(weights: Path) -> None:
    yard = Yard(num_replicas=2, hang=(1, "load"))

    async def act(fleet: Fleet) -> None:
        task = asyncio.create_task(fleet.update_weights(weights, 1))
        async with asyncio.timeout(5):
            while "load" not in yard.actions(1):  # noqa: ASYNC110 - the condition is the engine's state
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert yard.stage == ["serving", "serving"]
        assert fleet.version is None

    with_fleet(yard, act)


def test_updates_do_not_overlap(weights: Path) -> None:
    yard = Yard(num_replicas=2)

    async def act(fleet: Fleet) -> None:
        await asyncio.gather(fleet.update_weights(weights, 1), fleet.update_weights(weights, 2))

    with_fleet(yard, act)
    assert yard.faults == []


def test_a_folder_without_weights_is_refused_before_anything_is_paused(tmp_path: Path) -> None:
    yard = Yard()
    with pytest.raises(EngineError, match=r"holds no \*\.safetensors"):
        with_fleet(yard, lambda fleet: fleet.update_weights(tmp_path, 1))
    assert yard.events == []


def test_an_engine_that_is_not_there_or_serves_another_model_is_named_in_time() -> None:
    yard = Yard(num_replicas=1)

    async def act(fleet: Fleet) -> None:
        other = Fleet(fleet.urls, "another")
        with pytest.raises(EngineError, match=r"it serves \['policy'\], not `another`"):
            await other.wait_ready(5)
        await other.close()
        missing = Fleet([*fleet.urls, "http://127.0.0.1:9"], "policy")
        began = time.monotonic()
        with pytest.raises(
            EngineError, match=r"1 of 2 engines failed to become ready: http://127\.0\.0\.1:9"
        ):
            await missing.wait_ready(0.5)
        assert time.monotonic() - began < 5
        await missing.close()

    with_fleet(yard, act)


def test_gauges_are_polled_and_a_silent_engine_is_named() -> None:
    yard = Yard(num_replicas=2)

    async def act(fleet: Fleet) -> None:
        gauges = await fleet.poll()
        assert [gauges[url].running for url in fleet.urls] == [2.0, 2.0]
        fleet.begin(fleet.urls[0])
        assert fleet.pick("s") == fleet.urls[1]
        fleet.end(fleet.urls[0])
        silent = Fleet(["http://127.0.0.1:9"], "policy", dead_after_s=0.2)
        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9"):
            await silent.watch()
        await silent.close()

    with_fleet(yard, act)
