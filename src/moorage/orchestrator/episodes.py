"""`episodes/step_N/{train,eval}/{all,effective}/traces.jsonl`: one episode per line, as verifiers reads it (R14).

Lines are rendered and appended by a thread, in the order in which they were given. Episodes must not be
changed after they were given. A traceless episode gets its line as well.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.v1 import WireEpisode
from verifiers.v1.graph import RECORD_FLOAT_DECIMALS
from verifiers.v1.trace import EXCLUDE_FIELDS

from moorage.core.rundir import RunDir

FLUSH_S = 0.2


def render_episode(episode: WireEpisode) -> bytes:
    """The episode's record (`Episode.to_record`) as one line of JSON."""
    return (
        episode.model_dump_json(
            exclude={"traces": {"__all__": EXCLUDE_FIELDS}},
            exclude_none=True,
            context={"float_decimals": RECORD_FLOAT_DECIMALS},
        ).encode()
        + b"\n"
    )


def effective_copy(episode: WireEpisode, advantages: Mapping[str, float | None]) -> WireEpisode:
    """`episode` with only the traces in `advantages`, their credit in `info.advantage` (absent: unassigned)."""
    traces = []
    for trace in episode.traces:
        if trace.id in advantages:
            value = advantages[trace.id]
            extra = {} if value is None else {"advantage": value}
            traces.append(trace.model_copy(update={"info": trace.info | extra}))
    return episode.model_copy(update={"traces": traces})


class EpisodeLog:
    """Writes the files. Start `run` as a task; `close` writes the rest."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._waiting: list[tuple[Path, WireEpisode]] = []
        self._writing = asyncio.Lock()

    def add(self, step: int, split: str, subset: str, episode: WireEpisode) -> None:
        """Write `episode` soon."""
        self._waiting.append((self._run.traces(step, split, subset), episode))

    async def run(self) -> None:
        """Write for ever, every 0.2 s."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what was added so far."""
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            if waiting:
                await asyncio.shield(asyncio.to_thread(_append, waiting))

    async def close(self) -> None:
        await self.flush()


def _append(waiting: list[tuple[Path, Any]]) -> None:
    by_path: dict[Path, list[bytes]] = defaultdict(list)
    for path, episode in waiting:
        by_path[path].append(render_episode(episode))
    for path, lines in by_path.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"".join(lines))
