"""Pause, load, label, resume, abort: what the fleet and a cancelled rollout rely on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from moorage.engine.fleet import Fleet
from moorage.engine.generate import GenerateClient
from moorage.engine.loads import Gauges
from moorage.engine.parse import Completion
from tests.contract import reference
from tests.contract.conftest import Engine
from tests.contract.http import ask
from tests.contract.test_values import TOLERANCE, make_call, random_prompts

ENDLESS = {"ignore_eos": True, "stop_token_ids": [], "max_tokens": 150}


@asynccontextmanager
async def connected(engine: Engine, keep_cache: bool = False) -> AsyncIterator[tuple[GenerateClient, Fleet]]:
    """A client and a fleet of one; the engine has its first weights again afterwards."""
    client, fleet = GenerateClient(), Fleet([engine.url], "policy", keep_cache=keep_cache)
    try:
        yield client, fleet
    finally:
        await fleet.update_weights(engine.weights, 0)
        await client.close()
        await fleet.close()


async def gauges_until(fleet: Fleet, num: float, timeout_s: float = 20.0, *, or_more: bool = False) -> Gauges:
    """Poll until as many requests run and none waits."""
    gauges = Gauges()
    async with asyncio.timeout(timeout_s):
        while True:
            (gauges,) = (await fleet.poll()).values()
            if not gauges.waiting and (gauges.running == num or (or_more and gauges.running > num)):
                return gauges
            await asyncio.sleep(0.05)


def expected_logprobs(engine: Engine, version: int, prompt: list[int], completion: Completion) -> np.ndarray:
    """What the weights of an (even: first, odd: other) version give each token of a completion."""
    folder = engine.others if version % 2 else engine.weights
    logits = reference.sampled_logits(folder, prompt, completion.token_ids)
    logprobs = reference.processed_logprobs(logits)
    return logprobs[np.arange(len(completion.token_ids)), completion.token_ids]


def test_tokens_carry_the_version_that_generated_them_over_two_updates_in_flight(engine: Engine) -> None:
    prompts = random_prompts(16, seed=8)

    async def main() -> list[Completion]:
        async with connected(engine) as (client, fleet):
            await fleet.label(0)
            calls = [make_call(engine, p, f"flight-{i}", sampling=ENDLESS) for i, p in enumerate(prompts)]
            tasks = [asyncio.create_task(client.generate(call)) for call in calls]
            for version, folder in ((1, engine.others), (2, engine.weights)):
                await asyncio.sleep(0.3)
                await fleet.update_weights(folder, version)
            return await asyncio.gather(*tasks)

    spanning = 0
    for prompt, completion in zip(prompts, asyncio.run(main()), strict=True):
        assert len(completion.token_ids) == 150, "no request is lost or cut by an update"
        spanning += len(completion.weight_versions) > 1
        for version, start, end in completion.weight_versions:
            assert version is not None
            expected = expected_logprobs(engine, version, prompt, completion)
            np.testing.assert_allclose(
                completion.logprobs[start:end], expected[start:end], atol=TOLERANCE, err_msg=str(version)
            )
    assert spanning >= 8, "the updates came while the requests ran"


def test_after_an_update_no_block_of_older_weights_is_read(engine: Engine) -> None:
    prompt = [3, *random.Random(2).choices(range(7, 102), k=160)]

    async def main() -> list[Completion]:
        async with connected(engine) as (client, fleet):
            found = []
            for version, folder in ((3, engine.others), (4, engine.weights), (5, engine.others)):
                await fleet.update_weights(folder, version)
                found += [
                    await client.generate(make_call(engine, prompt, f"v{version}-{i}")) for i in range(2)
                ]
            return found

    completions = asyncio.run(main())
    assert [c.cached_tokens == 0 for c in completions] == [True, False] * 3
    for completion, version in zip(completions, (3, 3, 4, 4, 5, 5), strict=True):
        assert completion.weight_versions == ((version, 0, len(completion.token_ids)),)
        expected = expected_logprobs(engine, version, prompt, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_a_kept_cache_loses_no_request_and_names_its_versions(engine: Engine) -> None:
    async def main() -> Completion:
        async with connected(engine, keep_cache=True) as (client, fleet):
            await fleet.label(6)
            call = make_call(engine, [3, 72, 1, 4], "kept", sampling=ENDLESS)
            task = asyncio.create_task(client.generate(call))
            await gauges_until(fleet, 1)
            await fleet.update_weights(engine.others, 7)
            return await task

    completion = asyncio.run(main())
    assert len(completion.token_ids) == 150
    assert {version for version, _, _ in completion.weight_versions} <= {6, 7}
    assert completion.weight_versions[-1][0] == 7


def test_a_paused_engine_holds_requests_old_and_new_until_it_resumes(engine: Engine) -> None:
    async def main() -> None:
        async with connected(engine) as (client, fleet):
            old = asyncio.create_task(
                client.generate(make_call(engine, [3, 72, 1, 4], "old", sampling=ENDLESS))
            )
            await gauges_until(fleet, 1)
            assert await on_thread(engine, "POST", "/pause?mode=keep&clear_cache=true") == {
                "status": "paused"
            }
            new = asyncio.create_task(client.generate(make_call(engine, [3, 73, 1, 4], "new")))
            done, _ = await asyncio.wait({old, new}, timeout=0.7)
            assert not done
            assert await on_thread(engine, "GET", "/is_paused") == {"is_paused": True}
            await on_thread(engine, "POST", "/resume")
            assert await on_thread(engine, "GET", "/is_paused") == {"is_paused": False}
            first, second = await asyncio.gather(old, new)
            assert len(first.token_ids) == 150
            assert second.token_ids

    asyncio.run(main())


async def on_thread(engine: Engine, method: str, route: str, body: object = None) -> object:
    status, answer = await asyncio.to_thread(ask, engine, method, route, body)
    assert status == 200, answer
    return answer


def test_labels_are_read_back(engine: Engine) -> None:
    assert ask(engine, "POST", "/update_weight_version", {"new_version": "41"})[0] == 200
    assert ask(engine, "GET", "/weight_info")[1] == {"weight_version": "41"}
    assert ask(engine, "POST", "/update_weight_version", {})[0] == 400


def test_resuming_what_runs_changes_nothing(engine: Engine) -> None:
    assert ask(engine, "POST", "/resume") == (200, {"status": "resumed"})
    assert ask(engine, "POST", "/pause?mode=nonsense")[0] == 400
    assert ask(engine, "GET", "/is_paused")[1] == {"is_paused": False}


def test_cancelled_calls_free_their_places_at_once(engine: Engine) -> None:
    async def main() -> None:
        async with connected(engine) as (client, fleet):
            calls = [
                make_call(engine, [3, 72, 1, 4], f"cancel-{i}", sampling={**ENDLESS, "max_tokens": 250})
                for i in range(20)
            ]
            tasks = [asyncio.create_task(client.generate(call)) for call in calls]
            await gauges_until(fleet, 10, or_more=True)  # a slow poll may miss the moment at which all run
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended)
            assert client.stats.in_flight[engine.url] == 0
            gauges = await gauges_until(fleet, 0, timeout_s=10.0)
            assert gauges.cache_usage <= 0.5

    asyncio.run(main())


def test_an_aborted_request_answers_with_what_it_has(engine: Engine) -> None:
    async def main() -> tuple[int, dict]:
        async with connected(engine) as (_, fleet):
            body = {
                "model": "policy",
                "token_ids": [3, 72, 1, 4],
                "sampling_params": {**ENDLESS, "max_tokens": 250, "logprobs": 1, "detokenize": False},
            }
            request = asyncio.create_task(
                asyncio.to_thread(
                    ask, engine, "POST", "/inference/v1/generate", body, {"X-Request-Id": "cut-short"}
                )
            )
            await gauges_until(fleet, 1)
            await on_thread(engine, "POST", "/abort_requests", {"request_ids": ["generate-tokens-cut-short"]})
            return await request

    status, body = asyncio.run(main())
    (choice,) = body["choices"]
    assert status == 200
    assert body["request_id"] == "generate-tokens-cut-short"
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 250
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_an_unknown_control_method_is_refused(engine: Engine) -> None:
    if not engine.is_builtin:
        pytest.skip("a worker of vLLM that is asked for what it lacks takes the engine down")
    status, _ = ask(engine, "POST", "/collective_rpc", {"method": "no_such_method"})
    assert status >= 400
