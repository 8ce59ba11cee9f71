"""`episodes/step_N/{train,eval}/{all,effective}/traces.jsonl`: one episode a line, as verifiers reads it
(R14).

Lines are rendered and appended by a thread, in the order in which they were given. Episodes must not be
changed after they were given. A traceless episode gets its line as well.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import orjson
from verifiers.v1 import WireEpisode
from verifiers.v1.graph import RECORD_FLOAT_DECIMALS
from verifiers.v1.trace import EXCLUDE_FIELDS

from moorage.core.rundir import RunDir
from moorage.orchestrator.facts import count_tokens

FLUSH_S = 0.2
_File = tuple[int, str, str]
"""Step, split, subset."""

_COUNTS = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
_EXCLUDE = {
    **dict.fromkeys(_COUNTS, True),
    "traces": {"__all__": {**EXCLUDE_FIELDS, **dict.fromkeys(_COUNTS, True)}},
}


def render_episode(episode: WireEpisode) -> bytes:
    """The episode's record as one line of JSON, equal to `Episode.to_record()`.

    The token counts are put in by hand: verifiers computes each of them by building all branches anew, which
    is most of the cost of a record.
    """
    record = episode.model_dump(
        mode="json",
        exclude=_EXCLUDE,
        exclude_none=True,
        context={"float_decimals": RECORD_FLOAT_DECIMALS},
    )
    sums = dict.fromkeys(_COUNTS, 0)
    for trace, row in zip(episode.traces, record["traces"], strict=True):
        counts = dict(zip(_COUNTS, count_tokens(trace)[1:], strict=True))
        row |= counts
        sums = {name: sums[name] + counts[name] for name in _COUNTS}
    return orjson.dumps(record | sums) + b"\n"


def effective_copy(episode: WireEpisode, advantages: Mapping[str, float | None]) -> WireEpisode:
    """`episode` with only the traces in `advantages`; `info.advantage` is their credit, if assigned."""
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
        self._waiting: list[tuple[_File, WireEpisode]] = []
        self._writing = asyncio.Lock()

    def add(self, step: int, split: str, subset: str, episode: WireEpisode) -> None:
        """Write `episode` soon."""
        self._waiting.append(((step, split, subset), episode))

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
                await asyncio.shield(asyncio.to_thread(self._append, waiting))

    async def close(self) -> None:
        await self.flush()

    def _append(self, waiting: list[tuple[_File, WireEpisode]]) -> None:
        by_file: dict[_File, list[bytes]] = defaultdict(list)
        for file, episode in waiting:
            by_file[file].append(render_episode(episode))
        for file, lines in by_file.items():
            path = self._run.traces(*file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                out.write(b"".join(lines))
