"""The plan as data: records, and what a death of each means."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.config.base import make_config
from moorage.config.derive import derive
from moorage.config.model import is_mixture_of_experts
from moorage.config.run import DerivedConfigs, ProcessFacts, RunConfig
from moorage.core.errors import ConfigError
from moorage.launcher.checks import share_devices
from moorage.launcher.plan import Death, Devices, ProcessRecord, decide, first_cause, make_plan


def derived(**changes: object) -> DerivedConfigs:
    source = {"env": {"taskset": {"id": "moorage.tasksets.reverse_text"}}}
    data = {
        "max_steps": 3,
        "model": {"path": "m"},
        "orchestrator": {"train": [source], "eval": {"sources": [source]}},
        **changes,
    }
    config = make_config(RunConfig, data)
    ports = [9000 + index for index in range(config.inference.replicas)]
    return derive(
        config, ProcessFacts(run_dir="runs/x", run_id="r", max_steps=3), engine_ports=ports, is_moe=False
    )


def record(name: str = "x", kind: str = "env_server", **more: object) -> ProcessRecord:
    return ProcessRecord(name, kind, (), Path("log"), **more)  # type: ignore[arg-type]


def test_every_process_has_a_record_a_config_file_and_a_log() -> None:
    plan = make_plan(derived(), python="python")
    kinds = [r.kind for r in plan.records]
    assert kinds == ["inference", "env_server", "env_server", "orchestrator", "trainer"]
    for r in plan.records:
        assert Path(r.argv[-1]) in plan.configs
        assert r.log == plan.run.log(r.name)
    assert plan.records[-1].argv[:4] == ("python", "-m", "moorage.cli.main", "trainer")


def test_only_orchestrator_and_trainer_may_end_before_the_run_is_over() -> None:
    plan = make_plan(derived())
    assert {r.kind for r in plan.records if r.ends_well} == {"orchestrator", "trainer"}
    assert {r.on_death for r in plan.records} == {"end_run"}


def test_several_engines_get_names_ports_and_devices_of_their_own() -> None:
    plan = make_plan(derived(inference={"replicas": 2}), devices=Devices(((0,), (1,)), (2,)))
    engines = [r for r in plan.records if r.kind == "inference"]
    assert [r.name for r in engines] == ["inference", "inference.1"]
    assert [r.env["CUDA_VISIBLE_DEVICES"] for r in engines] == ["0", "1"]
    assert plan.records[-1].env["CUDA_VISIBLE_DEVICES"] == "2"
    assert [plan.configs[Path(r.argv[-1])]["inference"]["port"] for r in engines] == [9000, 9001]


def test_several_trainer_ranks_start_through_torchrun() -> None:
    plan = make_plan(derived(trainer={"num_ranks": 2}), rendezvous_port=1234)
    argv = plan.records[-1].argv
    assert "torch.distributed.run" in argv
    assert "--nproc-per-node=2" in argv
    assert "--master-port=1234" in argv


def test_no_secret_in_any_config() -> None:
    plan = make_plan(derived())
    assert "token" not in " ".join(key for config in plan.configs.values() for key in config)


def test_a_proper_end_is_done_and_only_for_those_that_end_well() -> None:
    assert decide(Death(record(ends_well=True), 0), living=[], restarts=[], now=0) == "done"
    assert decide(Death(record(ends_well=True), 1), living=[], restarts=[], now=0) == "end_run"
    assert decide(Death(record(), 0), living=[], restarts=[], now=0) == "end_run"


def test_restarts_are_counted_within_a_minute() -> None:
    flaky = record(on_death="restart")
    assert decide(Death(flaky, 1), living=[], restarts=[0.0, 1.0], now=10.0) == "end_run"
    assert decide(Death(flaky, 1), living=[], restarts=[0.0, 1.0], now=70.0) == "restart"


def test_a_group_lives_as_long_as_one_member() -> None:
    replica = record("a", on_death="go_on", group="g")
    other = record("b", on_death="go_on", group="g")
    assert decide(Death(replica, 1), living=[other], restarts=[], now=0) == "go_on"
    assert decide(Death(replica, 1), living=[record("c", group="h")], restarts=[], now=0) == "end_run"
    assert decide(Death(record(on_death="go_on"), 1), living=[], restarts=[], now=0) == "go_on"


def test_the_first_cause_is_the_killed_one_then_the_one_nearest_the_cause() -> None:
    trainer, engine = record("trainer", "trainer"), record("inference", "inference")
    assert first_cause([Death(trainer, 1), Death(engine, 1)]).record is engine
    assert first_cause([Death(trainer, -9), Death(engine, 1)]).record is trainer


def test_devices_go_to_the_engines_first_and_too_few_are_refused() -> None:
    two = derived(inference={"replicas": 2}, trainer={"num_ranks": 1})
    assert share_devices(two, 4) == Devices(((0,), (1,)), (2,))
    assert share_devices(two, 0) == Devices()
    assert share_devices(derived(), 1) == Devices()
    with pytest.raises(ConfigError, match="there are 2"):
        share_devices(two, 2)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"model_type": "qwen3"}, False),
        ({"num_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"num_experts": None}, False),
        ({"text_config": {"n_routed_experts": 64}}, True),
    ],
)
def test_a_mixture_of_experts_is_known_by_its_config(config: dict[str, object], answer: bool) -> None:
    assert is_mixture_of_experts(config) is answer
