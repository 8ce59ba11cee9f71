"""What the broker knows of the environment it serves: its configuration, its taskset, its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.config.env import EnvServerConfig
from moorage.core.errors import ConfigError
from moorage.env import protocol as wire
from moorage.env.streams import Streams

INLINE_TASKS = 50_000
"""Streams over more tasks, or over endless ones, are advanced off the event loop."""
_PROBED_TASKS = 8


@dataclass
class Environment:
    """One environment, resolved. `env_data` is plain and crosses to the workers."""

    env_id: str
    env_data: dict[str, Any]
    scores_groups: bool
    streams: Streams

    @property
    def is_quick(self) -> bool:
        """Whether a stream call takes microseconds."""
        return self.streams.num_tasks is not None and self.streams.num_tasks <= INLINE_TASKS

    def stream_call(self, request: wire.Request) -> bytes:
        """Carry out a stream request; the body of its reply. Raises EnvServerError."""
        match request:
            case wire.Sample():
                served = self.streams.sample(request.stream, request.limit)
                task = msgspec.Raw(wire.encode(describe(served.task)))
                return wire.encode(wire.SampleReply(task=task, epoch=served.epoch, position=served.position))
            case wire.Restore():
                self.streams.restore(request.stream, request.epoch, request.position, request.limit)
            case wire.CloseStream():
                self.streams.close(request.stream)
        return wire.encode(wire.Done())


def load_environment(config: EnvServerConfig) -> Environment:
    """Resolve the env block and load its taskset. Raises ConfigError naming what cannot work."""
    from verifiers.v1.utils import loaders

    from moorage.env.resolve import load_taskset, resolve_env

    env_data, seed = resolve_env(config.source.env, config.split)
    taskset = load_taskset(env_data)
    env_class = loaders.environment_class(env_data["taskset"]["id"], env_data.get("id") or "")
    streams = Streams(lambda: iter(taskset), infinite=not taskset.bounded, seed=seed)
    if streams.num_tasks == 0:
        raise ConfigError(f"taskset {env_data['taskset']['id']}: load() gave no tasks")
    for task in streams.peek(_PROBED_TASKS):
        check_wire(taskset, task)
    return Environment(
        env_id=loaders.resolve_env_config(env_data).env_id,
        env_data=env_data,
        scores_groups=hasattr(env_class, "score_group"),
        streams=streams,
    )


def describe(task: Any) -> wire.WireTask:
    """A verifiers task as it travels."""
    data = task.data.model_dump(mode="json")
    return wire.WireTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)


def check_wire(taskset: Any, task: Any) -> None:
    """Refuse a task that a worker would not get from the wire as it is. Raises ConfigError naming what."""
    from moorage.env.resolve import task_from_wire

    data = task.data
    what = f"task {data.idx} ({type(data).__name__})"
    try:
        dumped = msgspec.msgpack.decode(wire.encode(data.model_dump(mode="json")))
        again = task_from_wire(taskset, dumped)
    except Exception as error:  # noqa: BLE001 - whatever their serializer raises, it is their field
        raise ConfigError(f"{what} does not survive the wire: {error}") from None
    for name in type(data).model_fields:
        if getattr(data, name) != (back := getattr(again.data, name, None)):
            raise ConfigError(
                f"{what}: field `{name}` does not survive the wire ({getattr(data, name)!r} comes back as "
                f"{back!r}); use a type that pydantic can read back from JSON"
            )
        if _has_set(data.model_dump(include={name})):
            raise ConfigError(
                f"{what}: field `{name}` holds a set, whose order differs between processes, and the task's "
                "hash with it; use a list or a tuple"
            )
    for name in ("key", "hash"):
        here, there = getattr(task, name), getattr(again, name)
        if here != there:
            raise ConfigError(
                f"{what}: its {name} is {here!r} here and {there!r} behind the wire; make it depend on the "
                "task's data alone"
            )


def _has_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_set, value.values()))
    return isinstance(value, set | frozenset) or (
        isinstance(value, list | tuple) and any(map(_has_set, value))
    )
