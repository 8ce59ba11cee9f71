"""Running episodes: from a request's task to the bytes of its reply, inside a worker.

Owns one verifiers environment and what its model calls need. Promises: an episode's arrays are kept before
its reply is made; nothing is written for a request once `run` has returned or raised; replies hold no per-
token array (R1, R2). It does not know the broker, nor deadlines other than the one it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.retries import run_episode_with_retry

from moorage.config.env import EnvServerConfig
from moorage.core.errors import EnvServerError
from moorage.engine.generate import GenerateClient
from moorage.engine.render import RendererPool
from moorage.env.detectors import make_detectors
from moorage.env.keep import Keeper, keep_episode
from moorage.env.keeping import Keeping
from moorage.env.model_client import ModelService, policy_client, serving
from moorage.env.protocol import RunRollout, WireTask, check_size, encode
from moorage.env.resolve import load_env, task_from_wire
from moorage.env.turns import Run, SideTable
from moorage.payload.spool import Spool

if TYPE_CHECKING:
    from moorage.env.worker import Assignment

ARRAY_FIELDS = frozenset(
    {
        "token_ids",
        "mask",
        "is_content",
        "logprobs",
        "advantages",
        "reference_logprobs",
        "trainer_logprobs",
        "entropies",
        "loss_weights",
        "routed_experts",
        "sampling_mask",
    }
)
"""Per-token fields of a message node: they lie in the payload, never in a reply."""
_COUNTS = dict.fromkeys(("num_input_tokens", "num_output_tokens", "num_total_tokens"), True)
"""Derived from the other fields by whoever reads them; deriving each walks all branches."""
_EXCLUDE: dict[str, Any] = {
    **_COUNTS,
    "traces": {"__all__": {**_COUNTS, "nodes": {"__all__": ARRAY_FIELDS}}},
}
_REMEMBERED = 64
"""Contexts: one per source, engine and sampling settings."""


class Runner:
    """The environment of one worker."""

    def __init__(self, config: EnvServerConfig, assignment: Assignment) -> None:
        self.config = config
        self.assignment = assignment
        self.env = load_env(assignment.env_data)
        self.turns = SideTable()
        self.spool = Spool(
            assignment.spool_root, assignment.attempt_key, config.spool_budget_mib << 20, create=False
        )
        self.detectors = make_detectors(config.detectors, config.model_path)
        self.keeping = Keeping(self.spool)
        self._engine = GenerateClient()
        self._attempt: tuple[str, int] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold the environment's shared resources and the way to the engine."""
        service = ModelService(
            renderers=RendererPool(self.config.model_path, self.config.renderer),
            engine=self._engine,
            turns=self.turns,
            head_k=self.config.head_k,
            request_timeout_s=self.config.request_timeout_s,
        )
        try:
            async with serving(self.env, service):
                yield
        finally:
            await self._engine.close()
            self.keeping.close()
            self.spool.close()

    async def run(self, request_id: str, request: RunRollout, n: int | None, deadline_s: float) -> bytes:
        """One episode (`n` None) or a scored group of `n`; the body of the reply."""
        task = self._task(request)
        if (attempt := (request.run_id, request.attempt)) != self._attempt:
            self._attempt = attempt
            self._engine.forget_engines()
        context = _make_context(request.model, request.endpoint, bytes(request.sampling))
        with self.turns.begin(model=request.model, deadline_s=deadline_s) as run:
            if n is None:
                episodes = [await self._episode(task, context, run)]
            else:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._episode(task, context, run)) for _ in range(n)]
                episodes = [t.result() for t in tasks]
                await self.env.score_group(task, episodes)  # type: ignore[attr-defined]
            for episode in episodes:
                await self._keep(request_id, episode)
        dumped = [dump_episode(episode) for episode in episodes]
        body = encode(dumped[0] if n is None else dumped)
        check_size("the reply", len(body))
        return body

    async def _episode(self, task: vf.Task, context: vf.ModelContext, run: Run) -> vf.Episode:
        return await run_episode_with_retry(
            lambda: self.env.run_episode(task, context, on_trace=run.watch), self.env.config.retries
        )

    async def _keep(self, request_id: str, episode: vf.Episode) -> None:
        def keep(keeper: Keeper) -> None:
            url, store = self.assignment.payload_url, self.assignment.store
            keep_episode(episode, keeper, request_id, self.turns, url, store, self.detectors)

        if any(node.sampled for trace in episode.traces for node in trace.nodes):
            await self.keeping.keep(request_id, keep)
        else:
            keep(self.spool)  # nothing to write

    def _task(self, request: RunRollout) -> vf.Task:
        """Read anew for each run: what an environment scribbles on a task reaches no other episode."""
        try:
            task = msgspec.msgpack.decode(request.task, type=WireTask)
            return task_from_wire(self.env.taskset, task.data)
        except (ValidationError, msgspec.DecodeError) as error:
            raise EnvServerError("bad_request", f"the task does not fit this environment: {error}") from None


@lru_cache(_REMEMBERED)
def _make_context(model: str, endpoint: str, sampling: bytes) -> vf.ModelContext:
    """What the runs of a source share. verifiers builds one client for equal configs: making one is slow."""
    settings = vf.SamplingConfig(**msgspec.msgpack.decode(sampling))
    return vf.ModelContext(model=model, client=policy_client(endpoint), sampling=settings)


def dump_episode(episode: vf.Episode) -> dict[str, Any]:
    """The wire form of an episode: verifiers' own dump without per-token arrays and derived counts."""
    return episode.model_dump(mode="json", exclude=_EXCLUDE)
