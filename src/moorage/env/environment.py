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
                task = msgspec.Raw(wire.encode(served.task.data.model_dump(mode="json")))
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
        check_wire(task)
    return Environment(
        env_id=loaders.resolve_env_config(env_data).env_id,
        env_data=env_data,
        scores_groups=hasattr(env_class, "score_group"),
        streams=streams,
    )


def check_wire(task: Any) -> None:
    """Refuse a task that does not come back from the wire as it was. Raises ConfigError naming the field."""
    data = task.data
    what = f"task {data.idx} ({type(data).__name__})"
    try:
        dumped = msgspec.msgpack.decode(wire.encode(data.model_dump(mode="json")))
        again = type(data).model_validate(dumped)
    except Exception as error:  # noqa: BLE001 - whatever their serializer raises, it is their field
        raise ConfigError(f"{what} does not survive the wire: {error}") from None
    for name in type(data).model_fields:
        if getattr(data, name) != getattr(again, name):
            raise ConfigError(
                f"{what}: field `{name}` does not survive the wire ({getattr(data, name)!r} comes back as "
                f"{getattr(again, name)!r}); use a type that pydantic can read back from JSON"
            )
