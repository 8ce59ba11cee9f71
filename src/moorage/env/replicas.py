"""Several servers of one source as one: least busy, one coherent stream, dead ones passed over (R28).

Promises: a run goes to the living server with the fewest runs of ours in flight; tasks come from one server
at a time, and when that does not answer the next one continues its streams where they stood; no answer that
was lost skips a task, and no cursor that a server was left with is trusted; a dead server's calls have failed
by themselves (`EnvClient`), so nothing waits for it. It does not start or restart servers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from verifiers.v1.episode import WireEpisode

from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.env.client import EnvClient, Hello, Ping, RolloutCall, Sampled
from moorage.records.payload import Ledger

T = TypeVar("T")
log = get_logger(__name__)


class Replicas:
    """The env servers of one source."""

    def __init__(self, clients: Sequence[EnvClient]) -> None:
        if not clients:
            raise ValueError("a source needs at least one env server")
        self.clients = list(clients)
        self._sampler = self.clients[0]
        self._cursors: dict[str, tuple[int, int]] = {}
        self._keepers: dict[str, EnvClient | None] = {}
        """The server whose cursor of a stream is ours, None when none is for sure."""

    @property
    def alive(self) -> list[EnvClient]:
        """Servers that are not known to be dead."""
        return [client for client in self.clients if client.dead is None]

    @property
    def in_flight(self) -> int:
        """Runs that are awaited, on servers that can still answer."""
        return sum(client.in_flight for client in self.alive)

    @property
    def dead(self) -> str | None:
        """Why the source cannot go on, None while one server lives."""
        return None if self.alive else "; ".join(str(client.dead) for client in self.clients)

    async def connect(self, timeout_s: float = 60.0, adopt: Iterable[str] = ()) -> Hello:
        """Connect to all; the first one's description. Raises EnvServerError when servers do not agree."""
        adopt = tuple(adopt)
        hellos = [await client.connect(timeout_s, adopt) for client in self.clients]
        for client, hello in zip(self.clients, hellos, strict=True):
            first = hellos[0]
            if (hello.env_id, hello.num_tasks) != (first.env_id, first.num_tasks):
                raise EnvServerError(
                    "refused",
                    f"{client.address} serves {hello.env_id} with {hello.num_tasks} tasks, but "
                    f"{self.clients[0].address} serves {first.env_id} with {first.num_tasks}: replicas of a "
                    "source must be configured alike",
                )
        return hellos[0]

    async def sample(self, stream: str, limit: int | None = None) -> Sampled:
        """The next task of `stream`, from whichever server keeps it now. One call at a time for a stream."""

        async def sample(client: EnvClient) -> Sampled:
            if stream in self._keepers and self._keepers[stream] is not client:
                epoch, position = self._cursors.get(stream, (0, 0))
                await client.restore(stream, epoch, position, limit)
            return await client.sample(stream, limit)

        sampled = await self._on_sampler(stream, sample)
        self._cursors[stream] = (sampled.epoch, sampled.position)
        return sampled

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> None:
        """Set a stream's cursor."""
        await self._on_sampler(stream, lambda client: client.restore(stream, epoch, position, limit))
        self._cursors[stream] = (epoch, position)

    async def _on_sampler(self, stream: str, ask: Callable[[EnvClient], Awaitable[T]]) -> T:
        """Ask the sampler, or the next one while it does not answer: each server at most once."""
        left = len(self.clients)
        while True:
            client, left = self._sampler, left - 1
            try:
                answer = await ask(client)
            except BaseException as error:
                self._keepers[stream] = None  # it may have moved on unheard
                if not _is_silence(error) or not self._move_on(client) or not left:
                    raise
            else:
                self._keepers[stream] = client
                return answer

    def _move_on(self, failed: EnvClient) -> bool:
        at = self.clients.index(failed)
        others = [client for client in self.clients[at + 1 :] + self.clients[:at] if client.dead is None]
        if not others:
            return False
        if self._sampler is failed:
            self._sampler = others[0]
            log.warning("tasks now come from %s", self._sampler.address)
        return True

    async def close_stream(self, stream: str) -> None:
        """Forget a stream."""
        self._cursors.pop(stream, None)
        self._keepers[stream] = None  # until all have forgotten it
        for client in self.alive:
            if stream in client.streams:
                await client.close_stream(stream)
        del self._keepers[stream]

    async def run_rollout(self, call: RolloutCall) -> WireEpisode:
        """One episode on the least busy server."""
        return await self._least_busy().run_rollout(call)

    async def run_group(self, call: RolloutCall, n: int) -> list[WireEpisode]:
        """A group on the least busy server."""
        return await self._least_busy().run_group(call, n)

    def _least_busy(self) -> EnvClient:
        if not self.alive:
            raise EnvServerError("unreachable", f"no env server of this source is left: {self.dead}")
        return min(self.alive, key=lambda client: client.in_flight)

    async def ping(self) -> list[Ping]:
        """How the living servers are."""
        return [await client.ping() for client in self.alive]

    def take_abandoned(self) -> list[WireEpisode]:
        """Episodes that became ours while their caller was being cancelled: release their payloads."""
        return [episode for client in self.clients for episode in client.take_abandoned()]

    async def bye(self, retain: Iterable[str] = ()) -> Ledger:
        """End the attempt on all living servers; the sum of their accounts."""
        total, retain = Ledger(), tuple(retain)
        for client in self.alive:
            ledger = await client.bye(retain)
            total = total if ledger is None else total.add(ledger)
        return total

    async def close(self) -> None:
        """Disconnect from all."""
        for client in self.clients:
            await client.close()


def _is_silence(error: BaseException) -> bool:
    return isinstance(error, EnvServerError) and error.kind == "unreachable"
