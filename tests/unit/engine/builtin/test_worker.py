"""The engine thread: pauses that meet each other, and its death."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from moorage.core.errors import EngineError
from moorage.engine.builtin.request import Request, RequestError, SamplingParams
from moorage.engine.builtin.worker import EngineThread
from tests.unit.engine.builtin import reference as ref

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4, "intermediate_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ref.make_folder(tmp_path_factory.mktemp("worker") / "model", "qwen3", **SMALL)


def drive(folder: Path, act: Callable[[EngineThread], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        engine = EngineThread(ref.make_scheduler(folder, slots=8, length=512))
        engine.start()
        try:
            async with asyncio.timeout(60):
                return await act(engine)
        finally:
            await engine.stop()
            assert engine.num_open == 0
            assert not any(task.get_name() == "engine" for task in asyncio.all_tasks())

    return asyncio.run(main())


async def wait_until_running(engine: EngineThread) -> None:
    while True:
        if engine.scheduler.running:
            return
        await asyncio.sleep(0.001)


def request(name: str, tokens: int) -> Request:
    return ref.make_request(name, [5, 6, 7], SamplingParams(max_tokens=tokens))


def test_a_request_streams_each_token_when_asked(folder: Path) -> None:
    async def act(engine: EngineThread) -> list[int]:
        asked = request("a", 6)
        asked.streams = True
        queue = engine.submit(asked)
        counts = []
        while not counts or counts[-1] < 6:
            _, count = await queue.get()
            counts.append(count)
        engine.drop(asked)
        return counts

    assert drive(folder, act) == [1, 2, 3, 4, 5, 6]


def test_cancelling_frees_the_slot_before_the_next_step(folder: Path) -> None:
    async def act(engine: EngineThread) -> None:
        task = asyncio.create_task(engine.generate(request("a", 500)))
        await wait_until_running(engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        steps = await engine.call(lambda: engine.scheduler.totals.steps)  # queued behind the abort
        assert await engine.call(lambda: len(engine.scheduler.running)) == 0
        assert engine.scheduler.totals.steps == steps
        assert engine.num_open == 0

    drive(folder, act)


def test_a_second_pause_cuts_a_draining_one_short(folder: Path) -> None:
    async def act(engine: EngineThread) -> None:
        running = asyncio.create_task(engine.generate(request("a", 500)))
        await wait_until_running(engine)
        draining = [asyncio.create_task(engine.pause("wait", clear_cache=True)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in draining)
        await engine.pause("keep", clear_cache=True)
        await asyncio.gather(*draining)
        assert not running.done()
        await engine.resume()
        assert (await running).finish_reason == "length"

    drive(folder, act)


def test_resume_ends_a_pause_that_still_drains(folder: Path) -> None:
    async def act(engine: EngineThread) -> None:
        running = asyncio.create_task(engine.generate(request("a", 500)))
        await wait_until_running(engine)
        draining = asyncio.create_task(engine.pause("wait", clear_cache=False))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="paused"):
            engine.submit(request("b", 2))
        await engine.resume()
        await draining
        assert (await engine.generate(request("c", 2))).finish_reason == "length"
        assert (await running).finish_reason == "length"

    drive(folder, act)


def test_an_id_in_use_is_refused(folder: Path) -> None:
    async def act(engine: EngineThread) -> None:
        task = asyncio.create_task(engine.generate(request("a", 200)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in use"):
            await engine.generate(request("a", 2))
        await task
        await engine.generate(request("a", 2))

    drive(folder, act)


def test_the_death_of_the_thread_fails_every_open_call(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(engine: EngineThread) -> None:
        tasks = [asyncio.create_task(engine.generate(request(f"r{index}", 500))) for index in range(3)]
        await wait_until_running(engine)
        draining = asyncio.create_task(engine.pause("wait", clear_cache=True))
        await asyncio.sleep(0)
        del engine.scheduler.runner.model.lm_head  # the next forward cannot work
        for task in tasks:
            with pytest.raises(EngineError, match="the engine died"):
                await task
        with pytest.raises(EngineError, match="the engine died"):
            await draining
        assert isinstance(await engine.failed, AttributeError)
        with pytest.raises(EngineError, match="the engine is dead"):
            await engine.call(lambda: None)
        with pytest.raises(RequestError, match=r"dead|paused"):
            engine.submit(request("late", 2))

    drive(folder, act)
    assert "the engine thread died" in caplog.text
