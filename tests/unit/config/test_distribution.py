"""What is sampled for training is what the trainer computes with, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.test_derive import SOURCE, derived

TASKSET = SOURCE["env"]


def train_on(**source: Any) -> Any:
    return derived(orchestrator={"train": [{"name": "letters", "env": TASKSET, **source}]})


def measure_on(**source: Any) -> Any:
    sources = [{"name": "letters", "env": TASKSET, **source}]
    return derived(orchestrator={"train": [SOURCE], "eval": {"sources": sources}})


SHAPING = [
    ("temperature", 0.3),
    ("top_k", 4),
    ("top_p", 0.5),
    ("min_p", 0.1),
    ("min_tokens", 8),
    ("logit_bias", {"5": 1.0}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", 0.5),
    ("repetition_penalty", 1.1),
    ("bad_words", ["x"]),
    ("structured_outputs", {"regex": "a"}),
    ("something_new", 1),
]


@pytest.mark.parametrize(("key", "value"), SHAPING)
def test_what_shapes_the_distribution_is_refused_for_training_on_both_side_ways(key: str, value: Any) -> None:
    remedy = "sampling block"
    with pytest.raises(ValueError, match=f"'letters': sampling.extra_body.{key} .*{remedy}"):
        train_on(sampling={"extra_body": {key: value}})
    with pytest.raises(ValueError, match=f"'letters': sampling.extra_body.{key} .*{remedy}"):
        train_on(sampling={"extra_body": {"extra_body": {key: value}}})
    with pytest.raises(ValueError, match=f"'letters': env.agent.sampling.{key} .*{remedy}"):
        train_on(env={**TASKSET, "agent": {"sampling": {key: value}}})
    measure_on(sampling={"extra_body": {key: value}})
    measure_on(env={**TASKSET, "agent": {"sampling": {key: value}}})


def test_the_shared_block_is_looked_at_for_every_train_source() -> None:
    block = {"train": [SOURCE], "sampling": {"extra_body": {"min_tokens": 3}}}
    with pytest.raises(ValueError, match=r"'reverse_text': sampling.extra_body.min_tokens"):
        derived(orchestrator=block)


def test_what_only_ends_or_labels_a_completion_may_be_set() -> None:
    harmless = {"stop": ["x"], "ignore_eos": True, "seed": 3, "max_tokens": 9}
    train_on(sampling={"extra_body": harmless}, env={**TASKSET, "agent": {"sampling": harmless}})


def test_agents_that_never_train_sample_as_they_like() -> None:
    own = {"sampling": {"temperature": 0.0}}
    train_on(env={**TASKSET, "judge": {**own, "client": {"base_url": "http://judge/v1"}}})
    train_on(env={**TASKSET, "judge": {**own, "model": "frozen"}})
    with pytest.raises(ValueError, match=r"env.judge.sampling.temperature"):
        train_on(env={**TASKSET, "judge": {**own, "model": "policy"}})


def test_training_on_greedy_samples_is_refused_and_measuring_is_not() -> None:
    with pytest.raises(ValueError, match=r"'letters': sampling.temperature is 0: .* set it above 0"):
        train_on(sampling={"temperature": 0})
    measure_on(sampling={"temperature": 0})
