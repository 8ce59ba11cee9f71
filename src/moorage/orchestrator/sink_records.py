"""Records of the train sink: its settings, groups that are not complete, scored traces, windows, batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moorage.config.orchestrator import DropConfig
from moorage.orchestrator.algorithms.base import Algorithm
from moorage.orchestrator.events import Arrived
from moorage.orchestrator.facts import EpisodeFacts
from moorage.orchestrator.groups import Group
from moorage.orchestrator.metrics import TrainMarks
from moorage.records.sample import TrainSample


@dataclass(frozen=True)
class TrainSettings:
    """How one source's traces become samples. `truncated`: they were drawn from less than the vocabulary."""

    algorithm: Algorithm
    temperature: float
    group_size: int
    truncated: bool = False


@dataclass(frozen=True)
class SinkLimits:
    """What a batch is, and what may be in it. Give `batch_traces` or `batch_tokens`."""

    seq_len: int
    max_off_policy: int
    batch_traces: int | None
    batch_tokens: int | None = None
    drop: DropConfig = field(default_factory=DropConfig)
    require_routing: bool = False


@dataclass
class Pending:
    """A group that is not complete."""

    group: Group
    episodes: list[Arrived] = field(default_factory=list)
    facts: list[EpisodeFacts] = field(default_factory=list)
    missing: int = 0
    void: str | None = None

    @property
    def ok(self) -> list[Arrived]:
        return [event for event in self.episodes if event.episode.ok]

    @property
    def is_complete(self) -> bool:
        return len(self.episodes) + self.missing >= self.group.size


@dataclass(frozen=True)
class Scored:
    """A trace that waits for a batch."""

    trace: Any
    arrived: Arrived
    facts: EpisodeFacts
    samples: tuple[TrainSample, ...]
    oldest: int | None
    advantage: float | None

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass
class Fate:
    """An ok episode: how many of its traces wait, whether one shipped, why others did not."""

    open: int
    trained: bool = False
    reasons: list[str] = field(default_factory=list)


@dataclass
class Window:
    """What happened since the last cut. `episodes`: of groups that were finalised, each group whole and in
    exactly one window; `arrived`: that came in, whatever their group waits for."""

    episodes: list[EpisodeFacts] = field(default_factory=list)
    arrived: list[EpisodeFacts] = field(default_factory=list)
    marks: dict[str, TrainMarks] = field(default_factory=dict)
    decisions: list[frozenset[str]] = field(default_factory=list)
    num_stale: int = 0
    num_lone: int = 0


@dataclass(frozen=True)
class Batch:
    """What ships in `step`. `cohort`: the traces with at least one sample in it."""

    step: int
    samples: list[TrainSample]
    cohort: list[Scored]
    window: Window

    @property
    def blob_ids(self) -> list[str]:
        return [sample.payload.id for sample in self.samples]
