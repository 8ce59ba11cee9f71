"""What an algorithm is: it scores episodes and writes credit (R16).

One instance per train source. `score_episode` is called at arrival, for an ok episode; `score_group` once the
group is complete, with the episodes that have at least one survivor. Both may be coroutines (a teacher is
asked over the network). An algorithm never touches tokens: it assigns credit to message nodes.

A user algorithm is a class named by import path, `{type = "my_package.my_module:MyAlgorithm", option = 1}`;
the other keys are passed to its constructor as they are.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verifiers.v1 import WireEpisode

from moorage.core.errors import ConfigError
from moorage.orchestrator.credit import CreditTable


@dataclass(frozen=True)
class ScoredGroup:
    """A complete group. `episodes` are the ok ones, in order of arrival; `survivors` the ids of the traces
    that train: agent trainable, sampled, with a reward that is a number."""

    id: str
    source: str
    episodes: Sequence[WireEpisode]
    survivors: frozenset[str]

    @property
    def traces(self) -> Iterator[Any]:
        """The surviving traces of all episodes, flat."""
        for episode in self.episodes:
            for trace in episode.traces:
                if trace.id in self.survivors:
                    yield trace


@runtime_checkable
class Algorithm(Protocol):
    """The hooks. `state` and `restore` save what a resume must not lose (plain data)."""

    def score_episode(self, episode: WireEpisode, credit: CreditTable) -> Awaitable[None] | None: ...

    def score_group(self, group: ScoredGroup, credit: CreditTable) -> Awaitable[None] | None: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


def make_algorithm(table: Mapping[str, Any], registry: Mapping[str, type]) -> Algorithm:
    """The algorithm of an `algorithm = {type = ...}` table. Raises ConfigError naming what is wrong."""
    options = dict(table)
    kind = options.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"algorithm {dict(table)!r} needs a `type`, one of: {', '.join(sorted(registry))}")
    cls = registry.get(kind) or _import_class(kind, registry)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        valid = ", ".join(inspect.signature(cls).parameters) or "none"
        raise ConfigError(f"algorithm {kind!r}: {error} (options: {valid})") from None
    algorithm = cls(**options)
    missing = [
        name for name in ("score_episode", "score_group", "state", "restore") if not hasattr(cls, name)
    ]
    if missing:
        raise ConfigError(
            f"algorithm {kind!r} lacks {', '.join(missing)} (moorage.orchestrator.algorithms.base)"
        )
    return algorithm


def _import_class(path: str, registry: Mapping[str, type]) -> type:
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(
            f"unknown algorithm {path!r}; valid: {', '.join(sorted(registry))}, or a class by import path"
        )
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm {path!r} cannot be imported: {error}") from None
    if not isinstance(cls, type):
        raise ConfigError(f"algorithm {path!r} is no class")
    return cls
