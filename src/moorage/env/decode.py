"""Decoding an episode without stopping the event loop.

A reply is verifiers' own dump as plain data. Validating a long one takes tens of milliseconds, and a thread
would not help: the validator holds the interpreter. So nodes are validated a few at a time, and the loop runs
in between.
"""

from __future__ import annotations

from typing import Any

from verifiers.v1.episode import WireEpisode


async def decode_episode(data: dict[str, Any]) -> WireEpisode:
    """The episode of a reply. Raises pydantic's ValidationError."""
    return WireEpisode.model_validate(data)
