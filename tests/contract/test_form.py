"""Every recorded call, sent again: the same status, and an answer of the same form, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Engine
from tests.contract.form import form_faults
from tests.contract.http import ask

REPLIES = Path(__file__).parents[1] / "data" / "vllm_replies"
CONCURRENT = {"aborted", "spanning_an_update", "abort", "is_paused", "routed_and_masked"}
NAMES = sorted(path.stem for path in REPLIES.glob("*.json") if path.stem not in CONCURRENT)


def load(name: str, engine: Engine) -> dict[str, Any]:
    return json.loads((REPLIES / f"{name}.json").read_text().replace("FOLDER", str(engine.weights)))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {"metrics", "no_route", "models"}])
def test_a_recorded_call_is_answered_in_the_same_form(engine: Engine, name: str) -> None:
    example = load(name, engine)
    call = example["call"]
    status, body = ask(engine, call["method"], call["route"], call["body"])
    assert status == example["status"], body
    assert form_faults(example["body"], body) == []


def test_a_route_that_does_not_exist_is_not_found(engine: Engine) -> None:
    assert ask(engine, "GET", "/no/such/route")[0] == 404


def test_the_list_of_models_names_the_policy_and_its_length(engine: Engine) -> None:
    example = load("models", engine)
    status, body = ask(engine, "GET", "/v1/models")
    expected, card = example["body"]["data"][0], body["data"][0]
    assert status == 200
    assert body["object"] == "list"
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"} <= card.keys()
    for key in ("id", "object", "parent", "max_model_len", "root"):
        assert card[key] == expected[key]


def test_the_gauges_have_vllms_names(engine: Engine) -> None:
    def names(text: str) -> set[str]:
        return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    wanted = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert wanted <= names(load("metrics", engine)["body"])
    assert wanted <= names(ask(engine, "GET", "/metrics")[1])


def test_the_check_of_form_finds_what_it_should() -> None:
    expected = {"a": [{"token_id": 1, "rank": None}], "b": "x"}
    assert form_faults(expected, {"a": [{"token_id": 5, "rank": 3}], "b": ""}) == []
    assert form_faults(expected, {"a": [{"token_id": 5.0, "rank": 3}], "b": "", "c": 1}) != []
    assert form_faults(expected, {"a": [{"rank": 3}], "b": ""}) == ["body.a[].token_id is missing"]
    assert form_faults(expected, {"a": []}) == ["body.b is missing"]
