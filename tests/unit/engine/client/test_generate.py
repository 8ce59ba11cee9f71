from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from moorage.core.errors import EngineError
from moorage.core.net import find_free_port
from moorage.engine.generate import GenerateCall, GenerateClient, PromptTooLongError, make_body
from tests.unit.engine.client.loopback import Handler, models, reply, serve


def make_call(url: str, **changes: Any) -> GenerateCall:
    base = {
        "url": url,
        "model": "policy",
        "token_ids": [3, 7, 4],
        "sampling": {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [1], "seed": None},
        "request_id": "r1",
        "deadline_s": 5.0,
    }
    return GenerateCall(**{**base, **changes})


def run(
    handler: Handler,
    act: Callable[[GenerateClient, str], Awaitable[Any]],
    routes: dict[str, Handler] | None = None,
) -> Any:
    """`act(client, url)` against an engine whose generate route is `handler`."""

    async def main() -> Any:
        table = {"POST /inference/v1/generate": handler, "GET /v1/models": models}
        table |= {f"POST {route}": handler for route, handler in (routes or {}).items()}
        async with serve(table) as url:
            client = GenerateClient(retry_s=1.0)
            try:
                return await act(client, url)
            finally:
                assert not any(client.stats.in_flight.values())
                await client.close()

    return asyncio.run(main())


async def answer(_: web.Request) -> web.Response:
    return web.json_response(reply([80, 1]))


def test_a_call_carries_everything_that_the_engine_needs() -> None:
    seen: list[tuple[dict[str, Any], Any]] = []

    async def remember(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers))
        return web.json_response(reply([80, 1]))

    def call(client: GenerateClient, url: str) -> Awaitable[Any]:
        return client.generate(
            make_call(url, session_id="trace-1", cache_salt="7", routed_experts_prompt_start=2, head_k=4)
        )

    completion = run(remember, call)
    (body, headers) = seen[0]
    assert completion.token_ids == [80, 1]
    assert headers["X-Request-Id"] == "r1"
    assert headers["X-Session-ID"] == "trace-1"
    assert body == {
        "model": "policy",
        "token_ids": [3, 7, 4],
        "cache_salt": "7",
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 8,
            "stop_token_ids": [1],
            "logprobs": 5,
            "flat_logprobs": True,
            "detokenize": False,
            "routed_experts_prompt_start": 2,
        },
    }


def test_text_is_decoded_only_when_stop_strings_need_it() -> None:
    plain = json.loads(make_body(make_call("http://x")))["sampling_params"]
    stopping = json.loads(make_body(make_call("http://x", sampling={"stop": ["."]})))["sampling_params"]
    assert (plain["detokenize"], plain["logprobs"], "flat_logprobs" in plain) == (False, 1, False)
    assert stopping["detokenize"] is True


def test_an_overlong_prompt_is_refused_before_it_is_sent() -> None:
    sent: list[int] = []

    async def count(_: web.Request) -> web.Response:
        sent.append(1)
        return web.json_response(reply([1]))

    async def call(client: GenerateClient, url: str) -> None:
        with pytest.raises(PromptTooLongError, match="64 tokens does not fit max_model_len 64") as error:
            await client.generate(make_call(url, token_ids=[7] * 64))
        assert error.value.status == 400
        await client.generate(make_call(url, token_ids=[7] * 63))

    run(count, call)
    assert sent == [1]


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_a_refusal_is_final_and_says_what_the_engine_said(status: int) -> None:
    calls: list[int] = []

    async def refuse(_: web.Request) -> web.Response:
        calls.append(1)
        return web.json_response({"error": {"message": "no such thing", "code": status}}, status=status)

    async def call(client: GenerateClient, url: str) -> None:
        with pytest.raises(EngineError, match=f"answered {status}: no such thing") as error:
            await client.generate(make_call(url))
        assert (error.value.status, error.value.retryable) == (status, False)

    run(refuse, call)
    assert calls == [1]


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_refuses_for_now_is_asked_again_under_another_id(status: int) -> None:
    ids: list[str] = []

    async def busy(request: web.Request) -> web.Response:
        ids.append(request.headers["X-Request-Id"])
        if len(ids) < 3:
            return web.json_response({"error": {"message": "queue is full"}}, status=status)
        return web.json_response(reply([80, 1]))

    async def call(client: GenerateClient, url: str) -> None:
        await client.generate(make_call(url))
        assert client.stats.retries == 2

    run(busy, call)
    assert ids == ["r1", "r1.1", "r1.2"]


def test_a_connection_lost_before_an_answer_is_tried_again() -> None:
    count: list[int] = []

    async def drop_first(request: web.Request) -> web.Response:
        count.append(1)
        if len(count) == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(reply([80, 1]))

    completion = run(drop_first, lambda client, url: client.generate(make_call(url)))
    assert completion.token_ids == [80, 1]
    assert len(count) == 2


def test_an_engine_that_is_not_there_ends_the_call_within_its_bounds() -> None:
    async def main() -> None:
        client = GenerateClient(retry_s=0.3)
        url = f"http://127.0.0.1:{find_free_port()}"
        began = time.monotonic()
        with pytest.raises(EngineError, match="cannot be reached") as error:
            await client.generate(make_call(url, deadline_s=30))
        assert error.value.retryable
        assert time.monotonic() - began < 5
        assert client.stats.in_flight[url] == 0
        await client.close()

    asyncio.run(main())


class Stuck:
    """A generate route that answers when told to, and remembers who left."""

    def __init__(self) -> None:
        self.running = 0
        self.left = 0
        self.aborted: list[str] = []

    async def generate(self, _: web.Request) -> web.Response:
        self.running += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1
        return web.json_response(reply([1]))

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        return web.json_response({"status": "aborted", "aborted": 1})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition is another task's state
            await asyncio.sleep(0.01)


def test_a_cancelled_call_is_aborted_in_the_engine() -> None:
    stuck = Stuck()

    async def call(client: GenerateClient, url: str) -> None:
        task = asyncio.create_task(client.generate(make_call(url)))
        await until(lambda: stuck.running == 1)
        assert client.stats.in_flight[url] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stuck.aborted == ["generate-tokens-r1"]
        await until(lambda: stuck.running == 0)

    run(stuck.generate, call, {"/abort_requests": stuck.abort})
    assert stuck.left == 1


def test_a_call_ends_at_its_deadline_and_is_aborted() -> None:
    stuck = Stuck()

    async def call(client: GenerateClient, url: str) -> None:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"r1 within 0\.3 s"):
            await client.generate(make_call(url, deadline_s=0.3))
        assert time.monotonic() - began < 2
        assert stuck.aborted == ["generate-tokens-r1"]

    run(stuck.generate, call, {"/abort_requests": stuck.abort})


def test_cancelling_does_not_wait_for_an_engine_that_does_not_answer_the_abort() -> None:
    stuck = Stuck()

    async def call(client: GenerateClient, url: str) -> None:
        task = asyncio.create_task(client.generate(make_call(url)))
        await until(lambda: stuck.running == 1)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 4

    run(stuck.generate, call, {"/abort_requests": stuck.generate})


def test_what_the_engine_aborted_by_itself_is_an_error_and_no_completion() -> None:
    async def aborted(_: web.Request) -> web.Response:
        return web.json_response(reply([80, 81], finish_reason="abort"))

    async def call(client: GenerateClient, url: str) -> None:
        with pytest.raises(EngineError, match="aborted request r1 after 2 tokens"):
            await client.generate(make_call(url))

    run(aborted, call)


def test_a_large_reply_is_read_off_the_loop_and_counted() -> None:
    async def large(_: web.Request) -> web.Response:
        ids = list(range(2, 52)) * 60
        return web.json_response(reply(ids))

    async def call(client: GenerateClient, url: str) -> int:
        completion = await client.generate(make_call(url))
        assert client.stats.tokens == 3000
        return len(completion.token_ids)

    assert run(large, call) == 3000


def test_a_thousand_calls_cancelled_at_random_leave_no_count_behind() -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(0.01)
        return web.json_response(reply([80, 1]))

    async def ok(_: web.Request) -> web.Response:
        return web.json_response({})

    async def call(client: GenerateClient, url: str) -> None:
        for _ in range(10):
            tasks = [
                asyncio.create_task(client.generate(make_call(url, request_id=f"r{i}"))) for i in range(100)
            ]
            for index, task in enumerate(tasks):
                if index % 3 == 0:
                    await asyncio.sleep(0)
                    task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) or end.token_ids == [80, 1] for end in ended)
            assert client.stats.in_flight[url] == 0

    run(slow, call, {"/abort_requests": ok})
