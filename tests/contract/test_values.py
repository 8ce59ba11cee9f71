"""Ids, log-probabilities, heads, masks and rows, through the client, against a plain forward of the model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from moorage.core.errors import EngineError
from moorage.engine.generate import GenerateCall, GenerateClient, PromptTooLongError
from moorage.engine.parse import Completion
from tests.contract import reference
from tests.contract.conftest import MAX_MODEL_LEN, Engine

TOLERANCE = 1e-4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_k": 100, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.5},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
}


def random_prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[3, *rng.choices(range(7, 102), k=rng.randint(1, longest)), 1, 4] for _ in range(count)]


def make_call(engine: Engine, prompt: list[int], name: str, **changes: Any) -> GenerateCall:
    sampling = {"max_tokens": 12, "stop_token_ids": [1], **changes.pop("sampling", {})}
    base = {
        "url": engine.url,
        "model": "policy",
        "token_ids": prompt,
        "sampling": sampling,
        "request_id": name,
        "deadline_s": 60.0,
    }
    return GenerateCall(**{**base, **changes})


def complete(calls: list[GenerateCall]) -> list[Completion]:
    """All calls at once."""

    async def main() -> list[Completion]:
        client = GenerateClient()
        try:
            return await asyncio.gather(*(client.generate(call) for call in calls))
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_log_probabilities_are_those_of_the_distribution_sampled_from(engine: Engine, name: str) -> None:
    sampling = SAMPLINGS[name]
    prompts = random_prompts(6, seed=len(name))
    calls = [make_call(engine, prompt, f"{name}-{i}", sampling=sampling) for i, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, complete(calls), strict=True):
        assert completion.num_unusable == 0
        logits = reference.sampled_logits(engine.weights, prompt, completion.token_ids)
        logprobs = reference.processed_logprobs(logits, **sampling)
        positions = np.arange(len(completion.token_ids))
        expected = logprobs[positions, completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        if sampling["temperature"] == 0:
            gap = logits.max(-1) - logits[positions, completion.token_ids]
            assert gap.max() < 1e-4
        if completion.mask_counts is not None and completion.mask_ids is not None:
            kept = np.isfinite(logprobs)
            np.testing.assert_array_equal(completion.mask_counts, kept.sum(-1))
            np.testing.assert_array_equal(completion.mask_ids, np.nonzero(kept)[1])


@pytest.mark.parametrize("head_k", [1, 4, 127])
def test_heads_are_the_exact_top_k(engine: Engine, head_k: int) -> None:
    prompts = random_prompts(4, seed=head_k)
    calls = [
        make_call(engine, prompt, f"head-{head_k}-{i}", head_k=head_k) for i, prompt in enumerate(prompts)
    ]
    outside = 0
    for prompt, completion in zip(prompts, complete(calls), strict=True):
        assert completion.head_ids is not None
        assert completion.head_logprobs is not None
        logprobs = reference.processed_logprobs(
            reference.sampled_logits(engine.weights, prompt, completion.token_ids)
        )
        expected = -np.sort(-logprobs, -1)[:, :head_k]
        np.testing.assert_allclose(completion.head_logprobs, expected, atol=TOLERANCE)
        np.testing.assert_allclose(
            np.take_along_axis(logprobs, completion.head_ids, -1), completion.head_logprobs, atol=TOLERANCE
        )
        for row, token in zip(completion.head_ids, completion.token_ids, strict=True):
            assert len(set(row.tolist())) == head_k
            outside += token not in row
    assert outside or head_k == 127, "some sampled tokens lie outside a small head"


def test_a_head_over_a_kept_set_is_padded(engine: Engine) -> None:
    (completion,) = complete([make_call(engine, [3, 72, 1, 4], "kept-head", head_k=8, sampling={"top_k": 3})])
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    np.testing.assert_array_equal(completion.head_ids[:, 3:], -1)
    np.testing.assert_allclose(np.exp(completion.head_logprobs[:, :3]).sum(-1), 1.0, rtol=1e-4)


def test_company_in_the_batch_changes_no_value(engine: Engine) -> None:
    prompts = random_prompts(16, seed=3)
    sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "stop_token_ids": []}
    calls = [make_call(engine, p, f"batch-{i}", sampling=sampling) for i, p in enumerate(prompts)]
    together = complete(calls)
    for call, with_others in zip(calls[:4], together[:4], strict=True):
        (alone,) = complete([call])
        same = [a == b for a, b in zip(alone.token_ids, with_others.token_ids, strict=True)]
        num_same = same.index(False) if False in same else len(same)
        assert num_same, "the first token is decided by far more than noise"
        np.testing.assert_allclose(alone.logprobs[:num_same], with_others.logprobs[:num_same], atol=1e-5)


def test_a_seed_repeats_a_completion_and_none_does_not(engine: Engine) -> None:
    seeded = [
        make_call(engine, [3, 72, 1, 4], f"seed-{i}", sampling={"seed": 11, "ignore_eos": True})
        for i in (0, 1)
    ]
    free = [make_call(engine, [3, 72, 1, 4], f"free-{i}", sampling={"ignore_eos": True}) for i in (0, 1)]
    first, second, third, fourth = complete([*seeded, *free])
    assert first.token_ids == second.token_ids
    assert len({tuple(c.token_ids) for c in (first, third, fourth)}) == 3


def test_the_token_that_ends_an_answer_is_part_of_it(engine: Engine) -> None:
    calls = [
        make_call(engine, [3, 72, 1, 4], f"ends-{i}", sampling={"max_tokens": 100, "seed": i})
        for i in range(12)
    ]
    ended = [c for c in complete(calls) if c.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == 1
        assert 1 not in completion.token_ids[:-1]
    stops = {"stop_token_ids": list(range(2, 128)), "ignore_eos": True, "max_tokens": 100}
    (stopped,) = complete([make_call(engine, [3, 72, 1, 4], "stops", sampling=stops)])
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stopped.token_ids[-1]


def test_lengths_end_with_length(engine: Engine) -> None:
    endless = {"ignore_eos": True, "stop_token_ids": []}
    short, long = complete(
        [
            make_call(engine, [3, 72], "short", sampling={**endless, "max_tokens": 5}),
            make_call(engine, [7] * (MAX_MODEL_LEN - 3), "long", sampling={**endless, "max_tokens": 50}),
        ],
    )
    assert (short.finish_reason, len(short.token_ids)) == ("length", 5)
    assert (long.finish_reason, len(long.token_ids)) == ("length", 3)


def test_an_overlong_prompt_and_bad_ids_are_400(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError) as error:
        complete([make_call(engine, [7] * MAX_MODEL_LEN, "overlong")])
    assert error.value.status == 400
    with pytest.raises(EngineError, match="vocabulary") as other:
        complete([make_call(engine, [7, 100_000], "foreign")])
    assert (other.value.status, other.value.retryable) == (400, False)
    with pytest.raises(EngineError, match="nobody") as unknown:
        complete([make_call(engine, [7], "nobody", model="nobody")])
    assert unknown.value.status == 404


def test_a_repeated_prefix_is_served_from_the_cache_and_salt_separates(engine: Engine) -> None:
    prompt = random_prompts(1, seed=99)[0][:1] + random.Random(5).choices(range(7, 102), k=160)
    calls = [make_call(engine, prompt, f"prefix-{i}", cache_salt=salt) for i, salt in enumerate("aab")]
    first, again, other = (complete([call])[0] for call in calls)
    assert first.cached_tokens == 0
    assert again.cached_tokens is not None
    assert again.cached_tokens >= 96
    assert other.cached_tokens == 0
    logits = reference.sampled_logits(engine.weights, prompt, again.token_ids)
    logprobs = reference.processed_logprobs(logits)
    np.testing.assert_allclose(
        again.logprobs, logprobs[np.arange(len(again.token_ids)), again.token_ids], atol=TOLERANCE
    )


def test_routing_rows_cover_all_but_the_last_token(engine: Engine) -> None:
    if not (engine.is_builtin and engine.kind == "moe"):
        pytest.skip("a dense model has no experts, and a vLLM on a CPU returns no routing rows")
    prompt = random_prompts(1, seed=1)[0]
    calls = [
        make_call(engine, prompt, f"rows-{start}", routed_experts_prompt_start=start, sampling={"seed": 3})
        for start in (0, len(prompt) - 1)
    ]
    whole, tail = complete(calls)
    assert whole.routed_experts is not None
    assert tail.routed_experts is not None
    assert whole.routed_experts.shape == (len(prompt) + len(whole.token_ids) - 1, 2, 2)
    assert whole.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(tail.routed_experts, whole.routed_experts[len(prompt) - 1 :])
