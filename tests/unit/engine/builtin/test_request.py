"""Parsing of sampling parameters, and spans of versions."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.engine.builtin.request import RequestError, SamplingParams, parse_sampling
from tests.unit.engine.builtin import reference as ref


def test_null_and_unknown_keys_mean_nothing() -> None:
    given = {"temperature": None, "seed": None, "spaces_between_special_tokens": True, "detokenize": False}
    assert parse_sampling(given) == SamplingParams()


def test_a_tiny_temperature_is_raised_and_zero_is_greedy() -> None:
    assert parse_sampling({"temperature": 0.001}).temperature == 0.01
    assert parse_sampling({"temperature": 0}).greedy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens 4 is greater than max_tokens 3"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is not supported"),
        ({"logit_bias": {"3": 1}}, "logit_bias is not supported"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        (["temperature"], "must be an object"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_sampling(given)


def test_parameters_that_ask_for_nothing_are_taken() -> None:
    assert parse_sampling({"repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1})


def test_spans_are_contiguous_and_joined() -> None:
    request = ref.make_request("a", [1], SamplingParams())
    request.out = list(range(9))
    request.versions = [("1", 0), ("2", 4), ("3", 4), ("2", 4), ("4", 7)]
    assert request.spans() == [("1", 0, 4), ("2", 4, 7), ("4", 7, 9)]
    request.out = []
    request.versions = []
    assert request.spans() == []
