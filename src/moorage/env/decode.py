"""Decoding an episode without stopping the event loop.

A reply is verifiers' own dump as msgpack. Validating a long one takes hundreds of milliseconds, and a
thread would not help: the validator holds the interpreter. So message nodes and model calls, which are what
grows, are decoded and validated one by one, and whenever `SLICE_S` is used up the loop runs in between.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from pydantic import BaseModel
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import ModelCall

SLICE_S = 0.002
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
    head = {name: _plain.decode(raw) for name, raw in fields.items()}
    return WireEpisode.model_validate({**head, "traces": traces})


async def _decode_trace(body: msgspec.Raw, turns: _Turns) -> dict[str, Any]:
    trace: dict[str, Any] = {}
    for name, raw in _fields.decode(body).items():
        model = _LONG.get(name)
        if model is None:
            trace[name] = _plain.decode(raw)
            continue
        items = []
        for item in _list.decode(raw):
            items.append(model.model_validate(_plain.decode(item)))
            await turns.rest()
        trace[name] = items
    await turns.rest()
    return trace
