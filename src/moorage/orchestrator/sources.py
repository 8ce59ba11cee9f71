"""Where the next task comes from: the ratio-weighted train pick, and the slots of eval passes. Pure.

Nothing here knows a task: the env server owns the order of tasks (R22). The train source yields a name, the
eval source a pass with one more slot (R24). Every eval pass reads a stream of its own from the start, named
`eval/<name>@<version>`, so that a subset eval measures the same tasks each time (R26).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moorage.config.env import SamplingConfig, SourceConfig
from moorage.config.inherit import fill_sources, sampling_of
from moorage.config.orchestrator import OrchestratorConfig
from moorage.core.errors import ConfigError
from moorage.orchestrator.groups import Split


@dataclass(frozen=True)
class Source:
    """One environment with every inherited setting resolved."""

    name: str
    split: Split
    group_size: int
    sampling: SamplingConfig
    deadline_s: float
    ratio: float = 1.0
    algorithm: dict[str, Any] = field(default_factory=dict)
    interval: int = 1
    num_tasks: int | None = None

    @property
    def stream(self) -> str:
        """The train stream."""
        return f"{self.split}/{self.name}"


def resolve_train(config: OrchestratorConfig) -> list[Source]:
    """The train sources, with what they inherit filled in."""
    return [
        Source(**_shared(each, "train"), ratio=each.ratio, algorithm=each.algorithm or {})
        for each in fill_sources(config).train
    ]


def resolve_eval(config: OrchestratorConfig) -> list[Source]:
    """The eval sources, with what they inherit filled in."""
    return [
        Source(**_shared(each, "eval"), interval=each.interval or 1, num_tasks=each.num_tasks)
        for each in fill_sources(config).eval.sources
    ]


def _shared(source: SourceConfig, split: Split) -> dict[str, Any]:
    return {
        "name": str(source.name),
        "split": split,
        "group_size": source.group_size,
        "sampling": sampling_of(source),
        "deadline_s": source.deadline_s,
    }


def sampling_request(sampling: SamplingConfig) -> dict[str, Any]:
    """Sampling as a model call carries it; settings at their neutral value are left out."""
    request: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.top_p < 1:
        request["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        request["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        request["min_p"] = sampling.min_p
    if sampling.max_tokens is not None:
        request["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        request["seed"] = sampling.seed
    return request | sampling.extra_body


class TrainPicker:
    """Draws train sources by ratio. The i-th draw depends on the seed and i alone, so its state is i."""

    def __init__(self, sources: Sequence[Source], seed: int, num_picked: int = 0) -> None:
        if not sources:
            raise ConfigError("orchestrator.train names no environment; add a [[orchestrator.train]] block")
        self._names = [source.name for source in sources]
        self._bounds = list(itertools.accumulate(source.ratio for source in sources))
        self._seed = seed
        self.num_picked = num_picked

    def pick(self) -> str:
        """Name of the source of the next task."""
        at = random.Random(f"{self._seed}/{self.num_picked}").random() * self._bounds[-1]
        self.num_picked += 1
        for name, bound in zip(self._names, self._bounds, strict=True):
            if at < bound:
                return name
        return self._names[-1]


@dataclass
class EvalPass:
    """One measurement of one source at one policy version: a group for each of `num_tasks` positions.

    `done`: task position to episodes that are there already (a measurement that goes on where it stood).
    `position` is the next to open, `num_left` how many there are, and `failures` counts how often the task at
    it could not be had. `cursor` is where the stream stands on the env server, None when that is not known.
    """

    source: Source
    version: int
    num_tasks: int
    done: Mapping[int, int] = field(default_factory=dict)
    position: int = -1
    failures: int = 0
    cursor: int | None = None
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = sum(self._missing(at) > 0 for at in range(self.num_tasks))
        self._move_on()

    @property
    def stream(self) -> str:
        return eval_stream(self.source.name, self.version)

    @property
    def group_id(self) -> str:
        """Id of the group of the next position."""
        return group_id(self.stream, self.position)

    @property
    def num_missing(self) -> int:
        """Episodes that the next position still needs."""
        return self._missing(self.position)

    def advance(self) -> None:
        """The next position is open: on to the one behind it that still needs an episode."""
        self.num_left -= 1
        self._move_on()

    def _move_on(self) -> None:
        self.position += 1
        self.failures = 0
        while self.position < self.num_tasks and not self.num_missing:
            self.position += 1

    def _missing(self, position: int) -> int:
        return max(0, self.source.group_size - self.done.get(position, 0))


def eval_stream(name: str, version: int) -> str:
    """Name of the stream of one eval pass."""
    return f"eval/{name}@{version}"


def group_id(stream: str, position: int) -> str:
    """Id of the group of the task at `position` of an eval stream."""
    return f"{stream}/{position}"


class EvalSlots:
    """Passes with groups to open, served round-robin."""

    def __init__(self) -> None:
        self._passes: list[EvalPass] = []
        self._at = 0

    def __len__(self) -> int:
        """Groups still to open."""
        return sum(each.num_left for each in self._passes)

    def add(self, passes: Sequence[EvalPass]) -> None:
        self._passes += [each for each in passes if each.num_left]

    def next(self) -> EvalPass | None:
        """The pass whose turn it is, or None. It stays so until `opened`."""
        return self._passes[self._at % len(self._passes)] if self._passes else None

    def opened(self) -> None:
        """The next position of the pass whose turn it is has its group; then it is another's turn."""
        self._at %= len(self._passes)
        chosen = self._passes[self._at]
        chosen.advance()
        if chosen.num_left:
            self._at += 1
        else:
            self._passes.pop(self._at)


class EvalSchedule:
    """Decides which sources to measure at a policy version.

    A version is due for a source when it, or one that was skipped since the source was last measured, is a
    multiple of its interval; the last version is due for every source. What was begun and never became whole
    was not measured, and is due at the next version that is live.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        last_version: int,
        skip_first: bool,
        measured: Mapping[str, int] | None = None,
        retrigger: bool = False,
    ) -> None:
        """`measured`: source to the newest version that earlier attempts measured whole. `retrigger`: measure
        all sources at the first version, whatever was measured."""
        self._sources = list(sources)
        self._last_version = last_version
        never = 0 if skip_first else -1
        known = {} if retrigger or measured is None else measured
        self._since = {source.name: known.get(source.name, never) for source in sources}
        if retrigger:
            self._since = dict.fromkeys(self._since, -1)

    def due(self, version: int) -> list[Source]:
        """Sources to measure now that `version` is live."""
        chosen = [source for source in self._sources if self._is_due(source, version)]
        for source in chosen:
            self._since[source.name] = version
        return chosen

    def _is_due(self, source: Source, version: int) -> bool:
        since = self._since[source.name]
        if version <= since:
            return False
        return (
            since < 0
            or version >= self._last_version
            or version // source.interval > since // source.interval
        )
