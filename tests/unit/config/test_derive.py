"""One run file becomes every process's config; nothing is written twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moorage.config.base import make_config
from moorage.config.derive import derive
from moorage.config.env import EnvServerConfig
from moorage.config.run import DerivedConfigs, ProcessFacts, RunConfig
from moorage.core.errors import ConfigError

SOURCE = {"env": {"taskset": {"id": "moorage.tasksets.reverse_text"}}}


def make_run(**changes: Any) -> RunConfig:
    data = {"max_steps": 3, "model": {"path": "m"}, "orchestrator": {"train": [SOURCE]}, **changes}
    return make_config(RunConfig, data)


def derived(*, is_moe: bool = False, **changes: Any) -> DerivedConfigs:
    run = make_run(**changes)
    facts = ProcessFacts(run_dir="d", run_id="r", max_steps=3, seq_len=run.seq_len, seed=run.seed)
    ports = [7000 + index for index in range(run.inference.replicas)]
    return derive(run, facts, engine_ports=ports, is_moe=is_moe)


def test_what_is_left_out_follows_from_the_rest() -> None:
    config = derived(seq_len=100, seed=5)
    (engine,) = config.inference
    assert (engine.inference.max_model_len, engine.inference.seed, engine.inference.dtype) == (
        100,
        5,
        "float32",
    )
    assert config.trainer.trainer.seed == 5
    assert config.orchestrator.engine_urls == ["http://127.0.0.1:7000"]


def test_routing_is_replayed_for_mixtures_of_experts_only() -> None:
    dense, moe = derived(), derived(is_moe=True)
    assert (dense.trainer.trainer.router_replay, moe.trainer.trainer.router_replay) == (False, True)
    assert (dense.inference[0].inference.routed_experts, moe.inference[0].inference.routed_experts) == (
        False,
        True,
    )
    assert (dense.orchestrator.require_routing, moe.orchestrator.require_routing) == (False, True)


def test_truncated_sampling_records_its_kept_sets() -> None:
    orchestrator = {"train": [SOURCE], "sampling": {"top_p": 0.9, "top_k": 20}}
    assert derived(orchestrator=orchestrator).inference[0].inference.sampling_mask is True
    assert derived().inference[0].inference.sampling_mask is False


def test_engines_that_somebody_else_runs_are_not_started() -> None:
    config = derived(inference={"urls": ["http://elsewhere:1"]})
    assert config.inference == []
    assert config.orchestrator.engine_urls == ["http://elsewhere:1"]


def test_the_orchestrator_waits_for_engines_as_long_as_the_run_file_says() -> None:
    assert derived(inference={"ready_timeout_s": 1800.0}).orchestrator.ready_timeout_s == 1800.0


def test_a_source_with_an_address_gets_no_server() -> None:
    config = derived(orchestrator={"train": [{**SOURCE, "address": "tcp://h:1"}]})
    assert config.env_servers == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orchestrator": {"train": []}}, "is empty; add"),
        ({"orchestrator": {"train": [SOURCE, SOURCE]}}, "share a name"),
        ({"orchestrator": {"train": [SOURCE], "batch_size": 1, "token_batch_size": 1}}, "not both"),
        ({"orchestrator": {"train": [SOURCE], "max_inflight": 2}}, "below the group size"),
        ({"trainer": {"num_ranks": 3, "replicate": 2}}, "does not divide"),
        ({"orchestrator": {"train": [{"env": {}}]}}, "taskset.id"),
        ({"payload": {"retain": "checkpoint"}}, "set checkpoint.interval"),
        ({"checkpoint": {"keep_last": 2}}, "keep_last has no effect without checkpoint.interval"),
        ({"orchestrator": {"train": [SOURCE], "sampling": {"temperature": 0.005}}}, "raise this to 0.01"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_run(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"path": "m", "dtype": "float64"}}, "computes in float64.* set inference.dtype"),
        ({"trainer": {"loss": {"head_k": 2000}}}, "head_k is 2000, which is not within 0 and 1024"),
        ({"trainer": {"loss": {"head_k": -1}}}, "head_k is -1"),
        ({"trainer": {"loss": {"head_k": "many"}}}, "head_k is 'many'; it is a number"),
    ],
)
def test_what_a_process_would_refuse_is_refused_before_it_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        derived(**changes)


def test_a_float64_trainer_with_an_engine_of_its_own_dtype_is_fine() -> None:
    config = derived(model={"path": "m", "dtype": "float64"}, inference={"dtype": "float32"})
    assert (config.inference[0].inference.dtype, config.trainer.model.dtype) == ("float32", "float64")


def test_every_process_reads_the_config_that_was_derived_for_it() -> None:
    config = derived(
        is_moe=True,
        inference={"replicas": 2},
        orchestrator={"train": [SOURCE], "eval": {"sources": [SOURCE]}, "sampling": {"top_k": 9}},
        trainer={"optimizer": {"betas": (0.8, 0.9)}},
    )
    for each in (*config.inference, *config.env_servers, config.orchestrator, config.trainer):
        assert make_config(type(each), json.loads(json.dumps(each.model_dump(mode="json")))) == each


def test_a_split_that_there_is_not_is_refused_in_an_env_server_written_by_hand() -> None:
    with pytest.raises(ConfigError, match=r"split.*'train' or 'eval'"):
        make_config(EnvServerConfig, {"source": SOURCE, "split": "Train", "model_path": "m", "run_dir": "r"})
