"""Decoding an episode without stopping the event loop.

A reply is verifiers' own dump as msgpack. Validating a long one takes hundreds of milliseconds, and a
thread would not help: the validator holds the interpreter. So message nodes and model calls, which are what
grows, are decoded and validated one by one, and whenever `SLICE_S` is used up the loop runs in between.

Tasks and agent configs, which the episodes of a group have in common, are validated once: equal ones are one
object, which nobody may change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import ModelCall, TraceTask

SLICE_S = 0.002
_REMEMBERED = 256
_LONG: dict[str, type[BaseModel]] = {"nodes": MessageNode, "calls": ModelCall}
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_plain = msgspec.msgpack.Decoder()


class _Turns:
    """Gives the loop a turn when a slice of time is used up."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def rest(self) -> None:
        if time.perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S


async def decode_episodes(body: bytes) -> list[WireEpisode]:
    """The episodes of a group's reply. Raises pydantic's ValidationError or msgspec's DecodeError."""
    return [await decode_episode(raw) for raw in _list.decode(body)]


async def decode_episode(body: bytes | msgspec.Raw) -> WireEpisode:
    """The episode of a reply. Raises pydantic's ValidationError or msgspec's DecodeError."""
    turns = _Turns()
    fields = _fields.decode(body)
    traces = [await _decode_trace(raw, turns) for raw in _list.decode(fields.pop("traces"))]
    return WireEpisode.model_validate({**_decode_short(fields), "traces": traces})


async def _decode_trace(body: msgspec.Raw, turns: _Turns) -> dict[str, Any]:
    fields = _fields.decode(body)
    trace: dict[str, Any] = {}
    for name in _LONG.keys() & fields.keys():
        items = trace[name] = []
        for item in _list.decode(fields.pop(name)):
            items.append(_LONG[name].model_validate(_plain.decode(item)))
            await turns.rest()
    trace |= _decode_short(fields)
    await turns.rest()
    return trace


def _decode_short(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Fields that do not grow."""
    return {name: _SHARED.get(name, _plain.decode)(raw) for name, raw in fields.items()}


def _decode_agent(body: msgspec.Raw) -> dict[str, Any]:
    return {
        name: _read_config(bytes(raw)) if name == "config" else _plain.decode(raw)
        for name, raw in _fields.decode(body).items()
    }


@lru_cache(_REMEMBERED)
def _read_config(body: bytes) -> WireAgentConfig:
    return WireAgentConfig.model_validate(_plain.decode(body))


@lru_cache(_REMEMBERED)
def _read_task(body: bytes) -> TraceTask[WireTaskData]:
    return TraceTask[WireTaskData].model_validate(_plain.decode(body))


_SHARED: dict[str, Callable[[msgspec.Raw], Any]] = {
    "task": lambda body: _read_task(bytes(body)),
    "agent": _decode_agent,
}
