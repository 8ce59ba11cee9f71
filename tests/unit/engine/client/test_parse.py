from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.core.errors import EngineError
from moorage.engine.parse import Completion, parse_completion, parse_versions
from tests.unit.engine.client.loopback import entry, reply

REPLIES = Path(__file__).parents[3] / "data" / "vllm_replies"
GENERATED = [
    "sampled",
    "greedy",
    "head_4",
    "truncated_head_4",
    "stop_token",
    "end_of_text",
    "length_of_model",
    "spanning_an_update",
    "aborted",
    "routed_and_masked",
]


def load(name: str) -> dict[str, Any]:
    return json.loads((REPLIES / f"{name}.json").read_text())


def parse(body: dict[str, Any], **facts: Any) -> Completion:
    return parse_completion(json.dumps(body).encode(), **{"num_prompt_tokens": 5, **facts})


@pytest.mark.parametrize("name", GENERATED)
def test_every_recorded_reply_is_taken_whole(name: str) -> None:
    example = load(name)
    call, choice = example["call"]["body"], example["body"]["choices"][0]
    completion = parse(example["body"], num_prompt_tokens=len(call["token_ids"]))
    assert completion.token_ids == choice["token_ids"]
    assert completion.finish_reason == choice["finish_reason"]
    assert completion.stop_reason == choice["stop_reason"]
    assert completion.num_unusable == 0
    sent = [item["logprob"] for item in choice["logprobs"]["content"]]
    np.testing.assert_array_equal(completion.logprobs, np.array(sent, dtype=np.float32))
    assert completion.cached_tokens == 0
    assert completion.request_id.startswith("generate-tokens-")


def test_a_generation_over_an_update_names_both_versions() -> None:
    completion = parse(load("spanning_an_update")["body"])
    (first, start, middle), (second, again, end) = completion.weight_versions
    assert (first, start, second, end) == (3, 0, 4, 200)
    assert middle == again


def test_the_recorded_head_is_in_rank_order_and_drops_the_extra_sampled_token() -> None:
    example = load("head_4")  # four were asked for; vLLM lists the sampled token and three more
    completion = parse(example["body"], head_k=3)
    assert completion.head_ids is not None
    assert completion.head_ids.shape == (4, 3)
    content = example["body"]["choices"][0]["logprobs"]["content"]
    assert any(item["rank"] > 3 for item in content)
    for row, item in enumerate(content):
        ranked = sorted(item["top_logprobs"], key=lambda listed: listed["rank"])[:3]
        assert [listed["rank"] for listed in ranked] == [1, 2, 3]
        assert completion.head_ids[row].tolist() == [listed["token_id"] for listed in ranked]
        assert (item["token_id"] in completion.head_ids[row]) == (item["rank"] <= 3)


def test_a_head_over_truncated_sampling_pads_what_was_not_kept() -> None:
    completion = parse(load("truncated_head_4")["body"], head_k=4)
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    np.testing.assert_array_equal(completion.head_ids[:, 2:], -1)
    np.testing.assert_array_equal(completion.head_logprobs[:, 2:], -np.inf)
    np.testing.assert_allclose(np.exp(completion.head_logprobs[:, :2]).sum(axis=1), 1.0, rtol=1e-5)


def test_rows_and_masks_are_arrays_of_the_completion() -> None:
    completion = parse(load("routed_and_masked")["body"])
    assert completion.routed_experts is not None
    assert completion.routed_experts.shape == (7, 2, 2)
    assert completion.routed_experts.dtype == np.uint8
    assert completion.mask_counts is not None
    assert completion.mask_ids is not None
    assert completion.mask_counts.tolist() == [2, 1, 3]
    assert completion.mask_ids.tolist() == [72, 80, 73, 1, 72, 73]
    assert completion.mask_ids.dtype == np.int32


def test_a_sampled_id_ranked_third_gets_its_own_value() -> None:
    odd = {
        "token_id": 7,
        "logprob": -0.1,
        "top_logprobs": entry(7, -0.1, [(8, -0.5), (9, -2.5)])["top_logprobs"],
    }
    completion = parse(reply([9], [odd]))
    assert completion.logprobs.tolist() == [-2.5]
    assert completion.num_unusable == 0


@pytest.mark.parametrize(
    "content",
    [
        entry(7, -0.1, [(8, -0.5)]),
        entry(9, -9999.0),
        entry(9, float("nan")),
        entry(9, float("-inf")),
        entry(9, None),
    ],
    ids=["absent", "sentinel", "not a number", "infinite", "null"],
)
def test_a_log_probability_that_cannot_be_used_is_counted(content: dict[str, Any]) -> None:
    body = (
        json.dumps(reply([9, 5], [content, entry(5, -1.0)]))
        .replace("NaN", "null")
        .replace("-Infinity", "null")
    )
    completion = parse_completion(body.encode(), num_prompt_tokens=5)
    assert np.isnan(completion.logprobs[0])
    assert completion.logprobs[1] == -1.0
    assert completion.num_unusable == 1


def test_an_id_listed_twice_counts_once_and_a_contradiction_is_unusable() -> None:
    twice = entry(9, -0.25, [(9, -0.25), (3, -1.5), (3, -1.5), (4, -2.0)])
    contradiction = entry(9, -0.25, [(9, -0.75)])
    spoiled_once = entry(9, -9999.0, [(9, -0.75)])
    completion = parse(reply([9, 9, 9], [twice, contradiction, spoiled_once]), head_k=3)
    assert completion.logprobs[[0, 2]].tolist() == [-0.25, -0.75]
    assert np.isnan(completion.logprobs[1])
    assert completion.head_ids is not None
    assert completion.head_ids[0].tolist() == [9, 3, 4]


def test_a_sampled_token_that_ties_with_the_last_of_the_head_yields() -> None:
    completion = parse(reply([9], [entry(9, -2.0, [(1, -1.0), (2, -2.0)])]), head_k=2)
    assert completion.head_ids is not None
    assert completion.head_ids.tolist() == [[1, 2]]


@given(
    st.lists(st.floats(-30, 0, width=32), min_size=12, max_size=12, unique=True),
    st.integers(0, 11),
    st.integers(1, 8),
)
def test_a_head_is_the_exact_top_k_wherever_the_sampled_token_ranks(
    logprobs: list[float], sampled: int, head_k: int
) -> None:
    ranked = sorted(range(12), key=lambda token: -logprobs[token])
    listed = [(token, logprobs[token]) for token in ranked[: head_k + 1] if token != sampled][:head_k]
    completion = parse(reply([sampled], [entry(sampled, logprobs[sampled], listed)]), head_k=head_k)
    assert completion.head_ids is not None
    assert completion.head_ids.tolist() == [ranked[:head_k]]
    assert completion.logprobs.tolist() == [logprobs[sampled]]


def test_a_sampled_token_outside_its_own_kept_set_is_unusable() -> None:
    completion = parse(reply([9, 5], sampling_mask=[[3, 4], [5]]))
    assert np.isnan(completion.logprobs[0])
    assert completion.num_unusable == 1


def test_unlabelled_weights_have_no_version() -> None:
    assert parse_versions([{"version": "default", "start": 0, "end": 2}], 2) == ((None, 0, 2),)
    assert parse_versions(None, 2) == ()


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"choices": []}, "no completion"),
        ([], "no completion"),
        (reply([1, 2], [entry(1, -1.0)]), "1 log-probabilities for 2 tokens"),
        (reply([1], logprobs=None), "0 log-probabilities for 1 tokens"),
        (reply(["1"], [entry(1, -1.0)]), "not an id"),
        (reply([1], sampling_mask=[[1], [1]]), "2 sampling masks for 1 tokens"),
        (reply([1], routed_experts="?"), "routed_experts"),
        (
            reply([1], routed_experts=npy(np.zeros((4, 2, 2), np.uint8))),
            "4 routed_experts rows where 5 were due",
        ),
        (reply([1], routed_experts=npy(np.zeros((5, 2), np.uint8))), "shape"),
        (reply([1], routed_experts=npy(np.array([{}], dtype=object))), "routed_experts"),
        (reply([1], weight_versions=[{"version": "x", "start": 0, "end": 1}]), "'x' is no number"),
        (reply([1, 2], weight_versions=[{"version": "1", "start": 0, "end": 1}]), "end at token 1 of 2"),
        (reply([1, 2], weight_versions=[{"version": "1", "start": 1, "end": 2}]), "gap at token 0"),
    ],
)
def test_a_reply_in_another_form_is_refused_by_name(body: Any, what: str) -> None:
    with pytest.raises(EngineError, match="not in the agreed form") as error:
        parse(body)
    assert what in str(error.value)
    assert not error.value.retryable


def test_a_reply_that_is_not_json_is_refused() -> None:
    with pytest.raises(EngineError, match="no completion"):
        parse_completion(b"<html>", num_prompt_tokens=1)
