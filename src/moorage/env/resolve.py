"""An env block of a run file becomes verifiers' own configuration.

Owns: taking `taskset.shuffle` out (verifiers' configs forbid it), the rule for agents that name no runtime,
the checks that tasks survive the wire and that agents which train sample as their source does, and loading
environments from the resolved data.

Promises: whatever verifiers accepts is accepted; what cannot work here is a ConfigError that says what to
write. Resolved data is plain (JSON types), so it crosses processes; `load_env` and `load_taskset` read it.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError, create_model
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils import loaders

from moorage.config.base import explain
from moorage.config.distribution import agent_refusals
from moorage.core.errors import ConfigError

_GROUPS = ("tasksets", "harnesses", "envs", "judges")


def resolve_env(env: dict[str, Any], split: str) -> tuple[dict[str, Any], int | None]:
    """Verifiers' env config as plain data, and the shuffle seed (None: keep the taskset's order).

    `split` is `train` (finite tasksets are shuffled unless told otherwise) or `eval`. Raises ConfigError.
    """
    block = copy.deepcopy(env)
    shuffle = _take_shuffle(block)
    if not isinstance(block.get("taskset"), dict) or not block["taskset"].get("id"):
        raise ConfigError('env.taskset.id is missing, for example "moorage.tasksets.reverse_text"')
    _open_dotted_ids(block)
    config = _narrow(block)
    _choose_harnesses(block, config)
    config = _narrow(block)
    _choose_runtimes(block, config)
    config = _narrow(block)
    _choose_interception(block, config)
    config = _narrow(block)
    taskset = loaders.load_taskset(config.taskset)
    _check_wire(taskset)
    data = _plain(config)
    if split == "train":
        _check_sampling(config, data)
    return data, _shuffle_seed(shuffle, taskset, split)


def load_env(data: dict[str, Any]) -> vf.Env:
    """The environment of resolved data."""
    _open_dotted_ids(data)
    return loaders.load_environment(loaders.resolve_env_config(copy.deepcopy(data)))


def load_taskset(data: dict[str, Any]) -> vf.Taskset:
    """The taskset of resolved data, without its environment."""
    _open_dotted_ids(data)
    return loaders.load_taskset(loaders.resolve_env_config(copy.deepcopy(data)).taskset)


def task_from_wire(taskset: vf.Taskset, data: dict[str, Any]) -> vf.Task:
    """A new task, of which `task.data.model_dump()` was `data`. Raises pydantic's ValidationError."""
    cls = type(taskset).task_type()
    return cls(cls.data_type().model_validate(data), taskset.config.task)


# --- shuffle ---------------------------------------------------------------------------------------------


def _take_shuffle(block: dict[str, Any]) -> Any:
    taskset = block.get("taskset")
    return taskset.pop("shuffle", None) if isinstance(taskset, dict) else None


def _shuffle_seed(shuffle: Any, taskset: vf.Taskset, split: str) -> int | None:
    if shuffle is False:
        return None
    if shuffle is None:
        return 0 if split == "train" and taskset.bounded else None
    if not isinstance(shuffle, dict) or set(shuffle) - {"seed"}:
        raise ConfigError(
            f"taskset.shuffle = {shuffle!r}: write `shuffle = {{ seed = 0 }}`, or `shuffle = false` for the "
            "taskset's own order"
        )
    if not taskset.bounded:
        raise ConfigError(
            f"taskset.shuffle = {shuffle!r}: {taskset.config.id} has no end, so it cannot be shuffled; "
            "remove `shuffle`, or bound the taskset (its `num_tasks`, where it has one)"
        )
    seed = shuffle.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"taskset.shuffle.seed = {seed!r}: must be an integer")
    return seed


# --- verifiers' config -----------------------------------------------------------------------------------


def _narrow(block: dict[str, Any]) -> vf.EnvConfig:
    try:
        return loaders.resolve_env_config(copy.deepcopy(block))
    except ValidationError as error:
        raise ConfigError(f"env: {_explain(error, block)}") from None
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"env: {error}") from error


def _explain(error: ValidationError, block: dict[str, Any]) -> str:
    """What was wrong, with the keys that this taskset, these harnesses and this env really have."""
    taskset_id = block["taskset"]["id"]
    known = loaders.env_config_type(taskset_id, block.get("id") or "")
    narrowed: Any = {"taskset": (loaders.taskset_config_type(taskset_id), ...)}
    return explain(error, create_model(known.__name__, __base__=known, **narrowed))


def _plain(config: vf.EnvConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _choose_harnesses(block: dict[str, Any], config: vf.EnvConfig) -> None:
    """A taskset may name the harness of agents that name none: `DEFAULT_HARNESS`."""
    wanted = getattr(loaders.taskset_class(config.taskset.id), "DEFAULT_HARNESS", None)
    for name, agent in agent_config_fields(config).items():
        if wanted and agent.harness is None:
            block.setdefault(name, {})["harness"] = {"id": wanted}
    _open_dotted_ids(block)


def _choose_runtimes(block: dict[str, Any], config: vf.EnvConfig) -> None:
    """Agents without a runtime run here when their harness executes no code; else say which line to add."""
    harnesses = config.agent_harnesses()
    for name, agent in agent_config_fields(config).items():
        if "runtime" in agent.model_fields_set:
            continue
        harness = loaders.harness_class(harnesses[name].id)
        if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
            raise ConfigError(
                f"env.{name}: harness {harnesses[name].id!r} executes code and no runtime is named; add "
                f'`[env.{name}.runtime]` with `type = "docker"`, or "subprocess" to run it here unprotected'
            )
        block.setdefault(name, {})["runtime"] = {"type": "subprocess"}


def _choose_interception(block: dict[str, Any], config: vf.EnvConfig) -> None:
    """One interception server per worker when every agent runs on this machine, not one per 32 rollouts."""
    local = all(isinstance(a.runtime, SubprocessConfig) for a in agent_config_fields(config).values())
    if local and "interception" not in config.model_fields_set:
        block["interception"] = {"type": "server"}


def _check_sampling(config: vf.EnvConfig, data: dict[str, Any]) -> None:
    """Refuse sampling of an agent's own, the block's or the environment class's, that training would miss."""
    refusals = agent_refusals({name: data[name] for name in agent_config_fields(config)})
    if refusals:
        raise ConfigError("; ".join(refusals))


def _check_wire(taskset: vf.Taskset) -> None:
    data_cls = type(taskset).task_type().data_type()
    lost = [name for name, field in data_cls.model_fields.items() if field.exclude]
    if lost:
        raise ConfigError(
            f"taskset {taskset.config.id}: {data_cls.__name__}.{lost[0]} is excluded from serialization, so "
            "tasks would reach the env's workers without it; drop `exclude=True`"
        )


def _open_dotted_ids(value: Any) -> None:
    """Let verifiers find plugins by dotted ids such as `moorage.env.direct`.

    Its loader first looks for `<its own package>.<id>` with `importlib.util.find_spec`, which raises when a
    parent of a dotted name does not exist. Empty packages in the parents' places make it say "not found",
    and the loader then imports the id itself.
    """
    if isinstance(value, list):
        for item in value:
            _open_dotted_ids(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "id" and isinstance(item, str) and "." in item:
            _place_parents(item.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
        else:
            _open_dotted_ids(item)


def _place_parents(module: str) -> None:
    parts = module.split(".")
    for group in _GROUPS:
        for depth in range(1, len(parts)):
            name = ".".join([f"verifiers.v1.{group}", *parts[:depth]])
            if name not in sys.modules:
                package = ModuleType(name)
                package.__path__ = []
                sys.modules[name] = package
