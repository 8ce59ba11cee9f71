"""What an interrupted measurement left, and the table that a whole one ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import orjson
from verifiers.v1 import WireEpisode

from moorage.core.rundir import RunDir, write_bytes_atomic
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.events import is_infra_episode
from moorage.orchestrator.facts import EpisodeFacts, read_episode
from moorage.orchestrator.sources import EvalPass, Source, eval_stream, group_id


@dataclass(frozen=True)
class Earlier:
    """Episodes that are there already."""

    episodes: list[EpisodeFacts]

    def of(self, source: str) -> list[EpisodeFacts]:
        """Those of one source."""
        return [facts for facts in self.episodes if facts.env == source]

    def continued(self, source: Source, version: int, num_tasks: int) -> EvalPass:
        """The pass that needs only what is not there."""
        counts = Counter(facts.group_id for facts in self.of(source.name))
        stream = eval_stream(source.name, version)
        done = {at: counts[name] for at in range(num_tasks) if (name := group_id(stream, at)) in counts}
        return EvalPass(source, version, num_tasks, done)


def whole_sizes(environments: Iterable[Environment]) -> dict[str, int]:
    """Group size of the sources whose groups come whole or not at all."""
    return {each.source.name: each.source.group_size for each in environments if each.scores_groups}


def read_earlier(run: RunDir, version: int, sizes: Mapping[str, int], void: Collection[str] = ()) -> Earlier:
    """The final episodes of an interrupted measurement.

    Torn lines, episodes lost to an infrastructure failure, groups that are not whole though they must be
    (`sizes`: see `whole_sizes`), and all of the sources in `void` are taken out of the file: they are run
    again.
    """
    path = run.traces(version, "eval", "all")
    if not path.exists():
        return Earlier([])
    kept: list[tuple[bytes, EpisodeFacts]] = []
    for line in path.read_bytes().splitlines(keepends=True):
        episode = _read_line(line)
        name = (episode.env.name or "") if episode is not None else ""
        if episode is not None and name not in void and episode.group and not is_infra_episode(episode):
            facts = read_episode(episode, env=name, group_id=episode.group.id)
            kept.append((line if line.endswith(b"\n") else line + b"\n", facts))
    counts = Counter(facts.group_id for _, facts in kept)
    whole = [(line, facts) for line, facts in kept if counts[facts.group_id] >= sizes.get(facts.env, 0)]
    write_bytes_atomic(path, b"".join(line for line, _ in whole))
    return Earlier([facts for _, facts in whole])


def _read_line(line: bytes) -> WireEpisode | None:
    try:
        return WireEpisode.model_validate(orjson.loads(line))
    except ValueError:  # torn by the kill, or not ours
        return None


HEADLINES = ("avg@", "pass@", "pass^", "num_")


def render_results(results: Mapping[str, Mapping[str, float]]) -> str:
    """A table for the terminal: a row per source, a column per figure."""
    columns = sorted(
        {name for row in results.values() for name in row if "/" not in name and name.startswith(HEADLINES)},
        key=_column_order,
    )
    rows = [["source", *(name.removeprefix("num_") for name in columns)]]
    rows += [[name, *(_cell(row, column) for column in columns)] for name, row in sorted(results.items())]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _cell(row: Mapping[str, float], column: str) -> str:
    if column not in row:
        return ""
    return f"{row[column]:.0f}" if column.startswith("num_") else f"{row[column]:.4f}"


def _column_order(name: str) -> tuple[int, int, str]:
    kind = next(at for at, prefix in enumerate(HEADLINES) if name.startswith(prefix))
    tail = name.partition("@")[2] or name.partition("^")[2]
    return kind, int(tail) if tail.isdigit() else 0, name
