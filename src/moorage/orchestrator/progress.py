"""The orchestrator's state: what a resume continues from (docs/protocols.md section 4).

Written beside every batch and, at checkpoint steps, as the checkpoint's orchestrator part. It holds no
payload: what was scored but not shipped is dispatched again from its task.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.core.errors import ConfigError, ExchangeError
from moorage.orchestrator.outcomes import OutcomeCounts

STATE_VERSION = 2


class OpenTask(msgspec.Struct, frozen=True, array_like=True):
    """A group whose task is neither trained nor dropped."""

    source: str
    task: dict[str, Any]


class Progress(msgspec.Struct):
    """Totals over the whole run."""

    step: int = 1
    total_tokens: int = 0
    total_rollouts: int = 0
    total_tasks: int = 0


class State(msgspec.Struct):
    """All of it. `step`: the last one that shipped. `streams`: cursors behind everything ever sampled."""

    version: int
    step: int
    progress: Progress
    counts: OutcomeCounts
    sources: tuple[str, ...]
    num_picked: int
    streams: dict[str, tuple[int, int]]
    open_tasks: tuple[OpenTask, ...]
    algorithms: dict[str, Any]


encode_state = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(State)


def decode_state(data: bytes, sources: tuple[str, ...]) -> State:
    """The state in `data`. Raises ConfigError when it was made with other train sources."""
    try:
        state = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ExchangeError(f"the orchestrator's state cannot be read by this version: {error}") from None
    if state.version != STATE_VERSION:
        raise ExchangeError(
            f"the orchestrator's state is of form {state.version}, this version reads {STATE_VERSION}"
        )
    if set(state.sources) != set(sources):
        raise ConfigError(
            f"the checkpoint trained on {sorted(state.sources)}, the config names {sorted(sources)}; "
            "resume with the same train sources"
        )
    return state


class Unfinished:
    """Tasks of groups that are neither trained nor dropped, in the order in which they were opened. Pure."""

    def __init__(self) -> None:
        self._tasks: dict[str, OpenTask] = {}

    def open(self, group_id: str, source: str, task: dict[str, Any]) -> None:
        self._tasks[group_id] = OpenTask(source, task)

    def settle(self, group_id: str) -> None:
        """Trained or dropped for good; a second time changes nothing."""
        self._tasks.pop(group_id, None)

    @property
    def tasks(self) -> tuple[OpenTask, ...]:
        return tuple(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)
