"""What a source inherits reaches the process that uses it, through the file that the process reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage.config.base import load_config, make_config
from moorage.config.env import SamplingConfig
from moorage.config.evaluation import EvaluationConfig
from moorage.config.inherit import fill_sources
from moorage.config.orchestrator import OrchestratorConfig
from moorage.config.run import OrchestratorProcessConfig
from moorage.core.rundir import write_json_atomic
from moorage.orchestrator.evaluation import as_orchestrator
from moorage.orchestrator.sources import resolve_eval, resolve_train
from tests.unit.config.test_derive import SOURCE, derived

SHARED = {"max_tokens": 64, "top_k": 50, "top_p": 0.9, "seed": 3}
EVAL = {
    "sampling": {"max_tokens": 32, "top_k": 7},
    "interval": 5,
    "group_size": 2,
    "sources": [{**SOURCE, "sampling": {"temperature": 0.0}}, {**SOURCE, "name": "own", "interval": 9}],
}
RUN = {
    "sampling": SHARED,
    "group_size": 4,
    "algorithm": {"type": "grpo", "length_penalty": True},
    "train": [{**SOURCE, "sampling": {"temperature": 0.8}}, {**SOURCE, "name": "own", "group_size": 2}],
    "eval": EVAL,
}


def as_read(folder: Path) -> OrchestratorConfig:
    """The orchestrator's block as its process reads it."""
    path = folder / "orchestrator.json"
    write_json_atomic(path, derived(orchestrator=RUN).orchestrator.model_dump(mode="json"))
    return load_config(OrchestratorProcessConfig, path).orchestrator


def test_a_source_that_sets_one_sampling_field_keeps_the_shared_others_in_the_process(tmp_path: Path) -> None:
    first, second = resolve_train(as_read(tmp_path))
    assert first.sampling == SamplingConfig(**SHARED, temperature=0.8)
    assert second.sampling == SamplingConfig(**SHARED)
    greedy, other = resolve_eval(as_read(tmp_path))
    assert greedy.sampling == SamplingConfig(max_tokens=32, top_k=7, temperature=0.0)
    assert other.sampling == SamplingConfig(max_tokens=32, top_k=7)


def test_everything_else_that_is_inherited_reaches_the_process(tmp_path: Path) -> None:
    first, second = resolve_train(as_read(tmp_path))
    assert (first.group_size, second.group_size) == (4, 2)
    assert first.algorithm == second.algorithm == RUN["algorithm"]
    shared, own = resolve_eval(as_read(tmp_path))
    assert [(each.interval, each.group_size) for each in (shared, own)] == [(5, 2), (9, 2)]


def test_shared_truncation_asks_for_masks_when_a_source_sets_something_else() -> None:
    (engine,) = derived(orchestrator={**RUN, "train": RUN["train"][:1]}).inference
    assert engine.inference.sampling_mask is True


def test_an_evaluation_on_its_own_inherits_alike() -> None:
    data = {"model": {"path": "m"}, "group_size": 3, **{name: EVAL[name] for name in ("sampling", "sources")}}
    greedy, other = resolve_eval(as_orchestrator(make_config(EvaluationConfig, data)))
    assert greedy.sampling == SamplingConfig(max_tokens=32, top_k=7, temperature=0.0)
    assert (other.sampling.top_k, other.sampling.temperature, other.group_size) == (7, 1.0, 3)


FIELDS = {
    "temperature": st.sampled_from([0.5, 1.0]),
    "top_p": st.sampled_from([0.9, 1.0]),
    "top_k": st.integers(0, 2),
    "max_tokens": st.none() | st.integers(1, 9),
    "extra_body": st.sampled_from([{}, {"stop": ["x"]}]),
}
SAMPLING = st.fixed_dictionaries({}, optional=FIELDS)


@given(shared=SAMPLING, own=st.none() | SAMPLING)
def test_filling_in_again_after_json_changes_nothing(
    shared: dict[str, Any], own: dict[str, Any] | None
) -> None:
    config = make_config(
        OrchestratorConfig, {"sampling": shared, "train": [{**SOURCE, "sampling": own}], "eval": EVAL}
    )
    filled = fill_sources(config)
    assert filled.train[0].sampling == SamplingConfig(**{**shared, **(own or {})})
    again = make_config(OrchestratorConfig, json.loads(json.dumps(filled.model_dump(mode="json"))))
    assert fill_sources(again) == again == filled
