"""Text piece by piece, stop strings, and the wire form of what was drawn."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from moorage.engine.builtin import wire
from moorage.engine.builtin.calls import TextDecoder, cut
from moorage.engine.builtin.request import SamplingParams
from moorage.trainer.starter import make_tokenizer
from tests.unit.engine.builtin import reference as ref


def feed(text: str, stops: list[str]) -> tuple[list[str], str | None]:
    tokenizer = make_tokenizer()
    decoder = TextDecoder(tokenizer, stops)
    pieces = []
    ids = tokenizer.encode(text)
    for at, token in enumerate(ids):
        piece, matched = decoder.push([token], last=at == len(ids) - 1)
        pieces.append(piece)
        if matched is not None:
            return pieces, matched
    return pieces, None


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("hello world", [], "hello world", None),
        ("hello world", ["wor"], "hello ", "wor"),
        ("hello wok", ["wor"], "hello wok", None),
        ("aab aac", ["aac", "b a"], "aa", "b a"),
        ("hello", ["o"], "hell", "o"),
        ("hello wo", ["wor"], "hello wo", None),
    ],
)
def test_text_up_to_a_stop_string_is_shown(
    text: str, stops: list[str], shown: str, matched: str | None
) -> None:
    pieces, found = feed(text, stops)
    assert "".join(pieces) == shown
    assert found == matched


def test_nothing_that_may_begin_a_stop_string_is_shown_early() -> None:
    pieces, _ = feed("a wo x", ["wor"])
    assert pieces == ["a", " ", "", "", "wo ", "x"]


def test_a_cut_request_has_arrays_of_one_length() -> None:
    request = ref.make_request("a", [1, 2, 3], SamplingParams(logprobs=2, routed_experts_prompt_start=1))
    request.out = [5, 6, 7, 8]
    request.logprobs = [-1.0] * 4
    request.ranks = [1] * 4
    request.head_ids = request.head_logprobs = [np.zeros(2)] * 4
    request.versions = [("1", 0), ("2", 3)]
    request.routed_experts = np.zeros((3 - 1 + 4 - 1, 2, 2), dtype=np.uint8)
    short = cut(request, 2, "stop here")
    assert (short.out, len(short.logprobs), len(short.ranks), len(short.head_ids)) == ([5, 6], 2, 2, 2)
    assert short.spans() == [("1", 0, 2)]
    assert short.routed_experts is not None
    assert short.routed_experts.shape[0] == 3 - 1 + 2 - 1
    assert (short.finish_reason, short.stop_reason) == ("stop", "stop here")


def test_the_head_lists_the_drawn_token_first_and_as_many_entries_as_asked() -> None:
    request = ref.make_request("a", [1], SamplingParams(logprobs=3))
    request.out, request.logprobs, request.ranks = [9, 4], [-5.0, -1.0], [7, 2]
    request.head_ids = [np.array([2, 4, 6]), np.array([2, 4, 6])]
    request.head_logprobs = [np.array([-0.5, -1.0, -np.inf])] * 2
    content = wire.logprob_content(request)
    listed = [[(e["token_id"], e["logprob"], e["rank"]) for e in item["top_logprobs"]] for item in content]
    assert listed == [
        [(9, -5.0, 7), (2, -0.5, 1), (4, -1.0, 2)],
        [(4, -1.0, 2), (2, -0.5, 1), (6, -9999.0, 3)],
    ]


def test_arrays_travel_as_base64_of_npy() -> None:
    array = np.arange(12, dtype=np.uint16).reshape(2, 3, 2)
    back = np.load(io.BytesIO(base64.b64decode(wire.encode_array(array))))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == np.uint16
