"""An env block as verifiers takes it, with a runtime that can work; what cannot is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moorage.core.errors import ConfigError
from moorage.env.resolve import load_env, load_taskset, resolve_env, task_from_wire
from tests.support import player  # noqa: F401 - puts the test environments on the path

REVERSE: dict[str, Any] = {"id": "moorage.tasksets.reverse_text"}


def resolve(split: str = "train", **block: Any):
    return resolve_env({"taskset": REVERSE, **block}, split)


def test_resolved_data_is_plain_and_loads_elsewhere() -> None:
    data, _ = resolve(
        taskset={**REVERSE, "num_tasks": 3}, agent={"max_turns": 2, "sampling": {"max_tokens": 5}}
    )
    again = json.loads(json.dumps(data))
    env = load_env(again)
    assert env.config.agent.max_turns == 2  # type: ignore[attr-defined]
    assert env.config.agent.sampling.model_dump(exclude_unset=True) == {"max_tokens": 5}  # type: ignore[attr-defined]
    assert len(list(load_taskset(again))) == 3


def test_resolving_leaves_the_block_as_it_was() -> None:
    block = {"taskset": {**REVERSE, "shuffle": {"seed": 3}}}
    before = json.dumps(block)
    resolve_env(block, "train")
    assert json.dumps(block) == before


@pytest.mark.parametrize(
    ("split", "shuffle", "seed"),
    [
        ("train", None, 0),
        ("eval", None, None),
        ("train", {"seed": 7}, 7),
        ("eval", {"seed": 7}, 7),
        ("eval", {}, 0),
        ("train", False, None),
    ],
)
def test_train_shuffles_and_eval_does_not_unless_told(split: str, shuffle: Any, seed: int | None) -> None:
    taskset = REVERSE if shuffle is None else {**REVERSE, "shuffle": shuffle}
    assert resolve(split, taskset=taskset)[1] == seed


def test_an_endless_taskset_keeps_its_order() -> None:
    assert resolve(taskset={**REVERSE, "num_tasks": None})[1] is None


@pytest.mark.parametrize(
    ("shuffle", "message"),
    [
        (True, r"write `shuffle = \{ seed = 0 \}`"),
        ({"sed": 1}, r"write `shuffle = \{ seed = 0 \}`"),
        ({"seed": "a"}, "must be an integer"),
        ({"seed": True}, "must be an integer"),
    ],
)
def test_a_shuffle_that_means_nothing_is_refused(shuffle: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(taskset={**REVERSE, "shuffle": shuffle})


def test_shuffling_an_endless_taskset_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has no end.*remove `shuffle`, or bound the taskset"):
        resolve(taskset={**REVERSE, "num_tasks": None, "shuffle": {"seed": 1}})


def test_an_agent_that_executes_no_code_runs_on_this_machine() -> None:
    data, _ = resolve(agent={"harness": {"id": "null"}})
    assert data["agent"]["runtime"] == {"type": "subprocess"}
    assert data["interception"]["type"] == "server"


def test_an_agent_that_executes_code_needs_a_runtime_by_name() -> None:
    with pytest.raises(ConfigError, match=r'`\[env.agent.runtime\]` with `type = "docker"`'):
        resolve(agent={"harness": {"id": "bash"}})
    data, _ = resolve(agent={"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}})
    assert data["agent"]["harness"]["id"] == "bash"


def test_a_taskset_may_name_the_harness_of_agents_that_name_none() -> None:
    data, _ = resolve()
    assert data["agent"]["harness"]["id"] == "moorage.env.direct"
    roles, _ = resolve_env(
        {"taskset": {"id": "moorage.tasksets.proposer_solver"}, "solver": {"harness": {"id": "null"}}},
        "train",
    )
    assert roles["proposer"]["harness"]["id"] == "moorage.env.direct"
    assert roles["solver"]["harness"]["id"] == "null"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"taskset": {**REVERSE, "num_task": 5}},
            r"unknown key `taskset.num_task` \(did you mean `num_tasks`",
        ),
        ({"agnt": {}}, r"unknown key `agnt` \(did you mean `agent`"),
        ({"agent": {"max_turn": 3}}, r"unknown key `agent.max_turn` \(did you mean `max_turns`"),
        ({"taskset": {**REVERSE, "min_length": 9}}, "min_length = 9 is above max_length = 8"),
        ({"taskset": {"id": "moorage.tasksets.nothing"}}, "'moorage.tasksets.nothing' not found"),
        ({"taskset": {}}, "taskset.id is missing"),
        ({"agent": {"harness": {"id": "no_such_harness"}}}, "harness 'no_such_harness' not found"),
    ],
)
def test_what_verifiers_refuses_is_a_config_error_that_helps(block: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**block)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"temperature": 0.3},
            r"env.agent.sampling.temperature .*set `temperature` in the source's sampling",
        ),
        ({"extra_body": {"top_k": 4}}, r"env.agent.sampling.top_k "),
        ({"min_tokens": 4, "max_tokens": 9}, r"env.agent.sampling.min_tokens may change the distribution"),
    ],
)
def test_an_agent_that_trains_samples_as_its_source_does(sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(agent={"sampling": sampling})
    assert resolve("eval", agent={"sampling": sampling})[0]["agent"]["sampling"]
    elsewhere = {"sampling": sampling, "client": {"type": "eval", "base_url": "http://judge/v1"}}
    assert resolve(agent=elsewhere)[0]["agent"]["sampling"], "who plays elsewhere never trains"


def test_sampling_that_an_environment_class_brings_along_counts_as_well() -> None:
    block = {"id": "opinionated", "taskset": REVERSE}
    with pytest.raises(ConfigError, match=r"env.agent.sampling.top_p would change what is sampled"):
        resolve_env(block, "train")
    assert resolve_env(block, "eval")[0]["agent"]["sampling"] == {"top_p": 0.5}


def test_task_data_that_does_not_survive_the_wire_is_refused_by_field() -> None:
    with pytest.raises(ConfigError, match=r"ForgetfulData.secret is excluded from serialization"):
        resolve_env({"taskset": {"id": "forgetful"}}, "train")


def test_a_task_from_the_wire_is_the_task_that_was_sampled() -> None:
    data, _ = resolve(taskset={**REVERSE, "num_tasks": 2})
    taskset = load_taskset(data)
    first = next(iter(taskset))
    again = task_from_wire(taskset, json.loads(json.dumps(first.data.model_dump(mode="json"))))
    assert again.data == first.data
    assert again.hash == first.hash
    assert type(again) is type(first)
