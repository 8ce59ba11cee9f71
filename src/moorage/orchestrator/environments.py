"""Sources with the servers that run them, as the dispatcher sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.v1 import WireEpisode

from moorage.env.client import RolloutCall
from moorage.orchestrator.events import read_payloads
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.sources import Source
from moorage.records.payload import Ledger


class EnvClients(Protocol):
    """The calls of `env.client.EnvClient` (or `env.replicas.Replicas`) that the dispatcher makes."""

    async def sample(self, stream: str, limit: int | None = None) -> Any: ...

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> Any: ...

    async def close_stream(self, stream: str) -> Any: ...

    async def run_rollout(self, call: RolloutCall) -> WireEpisode: ...

    async def run_group(self, call: RolloutCall, n: int) -> Sequence[WireEpisode]: ...

    async def ping(self) -> Any: ...

    def take_abandoned(self) -> list[WireEpisode]: ...

    async def bye(self) -> Any: ...

    async def close(self) -> Any: ...


@dataclass(frozen=True)
class Environment:
    """A source and the servers that run it."""

    source: Source
    client: EnvClients
    scores_groups: bool = False


@dataclass
class Cursors:
    """Where each train stream stands: behind the furthest task that was ever sampled."""

    streams: dict[str, tuple[int, int]] = field(default_factory=dict)

    def advance(self, stream: str, epoch: int, position: int) -> None:
        self.streams[stream] = max(self.streams.get(stream, (0, 0)), (epoch, position))


@dataclass
class Limits:
    """How the dispatcher is bounded. `group_deadline_s`: of train groups."""

    retries: int
    max_events: int
    group_deadline_s: float = math.inf
    sample_retry_s: float = 1.0


def release_abandoned(environments: Iterable[Environment], holdings: Holdings) -> None:
    """Take back what became ours while its run was being cancelled, and free it."""
    for environment in environments:
        for episode in environment.client.take_abandoned():
            payloads = read_payloads(episode)
            holdings.hold(payloads, "dispatcher")
            holdings.release(payloads, "dispatcher")


async def read_ledgers(environments: Iterable[Environment]) -> Ledger:
    """The account over all their stores. Raises EnvServerError when a server does not answer."""
    total = Ledger()
    for environment in environments:
        answers = await environment.client.ping()
        for answer in answers if isinstance(answers, list) else [answers]:
            total = total if answer.ledger is None else total.add(answer.ledger)
    return total
