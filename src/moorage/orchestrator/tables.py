"""Rows of a sample table: a few episodes a person can read, one row per branch (R20). Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from verifiers.v1 import WireEpisode
from verifiers.v1.types import content_text

TEXT_LIMIT = 4000


def choose_episodes(episodes: Sequence[WireEpisode], num: int, seed: str) -> list[WireEpisode]:
    """`num` of them, chosen by the seed, in their order."""
    if len(episodes) <= num:
        return list(episodes)
    chosen = sorted(random.Random(seed).sample(range(len(episodes)), num))
    return [episodes[at] for at in chosen]


def sample_rows(episodes: Sequence[WireEpisode], step: int, max_rows: int) -> list[dict[str, Any]]:
    """At most `max_rows` rows, all with the same columns."""
    rows = (row for episode in episodes for row in _episode_rows(episode, step))
    return [row for row, _ in zip(rows, range(max_rows), strict=False)]


def _episode_rows(episode: WireEpisode, step: int) -> Iterator[dict[str, Any]]:
    for trace in episode.traces:
        for branch in trace.branches:
            yield {
                "step": step,
                "env": episode.env.name or episode.env.id,
                "task": episode.task.key or "",
                "agent": trace.agent.name,
                "branch_idx": branch.index,
                "messages": "\n".join(_lines(branch.messages))[:TEXT_LIMIT],
                "reward": trace.reward,
                "error": trace.errors[-1].type if trace.errors else "",
            }


def _lines(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        yield f"[{message.role}] {content_text(message.content) or ''}"
