# ruff: noqa: ARG001, ARG002, ARG005, ASYNC110 - partners take what the real ones take
"""Scripted partners for the orchestrator: episodes, an env server, a payload store, engines, a trainer.

They are small and real: the store counts as a store counts, the env server owns streams and custody up to the
acknowledgement, the trainer reads batches from the run folder, frees their payloads and publishes weights.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1 import WireEpisode, WireTrace

from moorage.core.errors import EnvServerError
from moorage.core.rundir import RunDir
from moorage.env.client import Ping, RolloutCall, Sampled
from moorage.exchange.batches import read_batch
from moorage.exchange.weights import publish_weights
from moorage.orchestrator.events import read_payloads
from moorage.orchestrator.payloads import payload_refs
from moorage.records.payload import HOLDERS, BranchPayload, Ledger, NodeSpan, PayloadRef, TracePayload
from moorage.records.sample import owned_slices

URL, STORE = "http://127.0.0.1:1", "train/script.node"


class ScriptedStore:
    """Counts what a payload store counts. `release` is called from a thread."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.freed_by: dict[str, str] = {}
        self.double: list[tuple[str, str, str]] = []
        self.unknown: list[str] = []
        self.pending_releases: list[Any] = []
        self._ids = itertools.count()

    def keep(self) -> str:
        blob = f"blob{next(self._ids)}"
        self.kept[blob] = 100
        return blob

    def release(self, refs: Iterable[PayloadRef], by: str, deadline_s: float = 10.0) -> int:
        refs = list(refs)
        for ref in refs:
            if ref.id not in self.kept:
                self.unknown.append(ref.id)
            elif ref.id in self.freed_by:
                self.double.append((ref.id, self.freed_by[ref.id], by))
            else:
                self.freed_by[ref.id] = by
        return len(refs)

    @property
    def ledger(self) -> Ledger:
        freed = Counter(self.freed_by.values())
        return Ledger(
            kept=len(self.kept),
            kept_bytes=sum(self.kept.values()),
            freed={holder: freed[holder] for holder in HOLDERS},
            double_frees=len(self.double),
            unknown=len(self.unknown),
            outstanding=len(self.kept) - len(self.freed_by),
        )

    def assert_clean(self) -> None:
        assert not self.double
        assert not self.unknown
        assert self.ledger.outstanding == 0


def make_task(index: int) -> dict[str, Any]:
    data = {"idx": index, "prompt": f"task {index}", "name": f"t{index}"}
    return {"type": "ScriptedTask", "data": data, "key": f"k{index}", "hash": f"h{index}"}


@dataclass
class Says:
    """One trace of a scripted episode. `branches`: number of leaves. `detected`: what the detectors say."""

    reward: float | None = 1.0
    agent: str = "agent"
    trainable: bool = True
    ok: bool = True
    branches: int = 1
    prompt_tokens: int = 4
    completion_tokens: int = 6
    detected: dict[str, bool] = field(default_factory=dict)
    versions: tuple[int, int] | None = (0, 0)
    error: str = "TaskError"
    routing: tuple[int, int] | None = None
    kept_sets: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str | None = "agent_completed"


def make_trace(
    says: Says, task: dict[str, Any], store: ScriptedStore | None, *, keep: bool = True
) -> WireTrace:
    """A trace with one prompt node and one sampled node per branch, its payload kept in `store`."""
    nodes: list[dict[str, Any]] = [
        {"parent": None, "message": {"role": "user", "content": task["data"]["prompt"]}}
    ]
    calls: list[dict[str, Any]] = []
    usage = {"prompt_tokens": says.prompt_tokens, "completion_tokens": says.completion_tokens}
    for _ in range(says.branches):
        calls.append(
            {"node": len(nodes), "usage": usage, "finish_reason": "stop", "time": {"start": 1, "end": 2}}
        )
        nodes.append({"parent": 0, "sampled": True, "message": {"role": "assistant", "content": "answer"}})
    trace = WireTrace.model_validate(
        {
            "task": task,
            "agent": {"config": {}, "name": says.agent, "trainable": says.trainable},
            "nodes": nodes,
            "calls": calls,
            "rewards": {"score": None if says.reward is None else {"score": says.reward, "weight": 1.0}},
            "metrics": says.metrics,
            "is_completed": True,
            "ok": says.ok,
            "stop_condition": says.stop,
            "errors": [] if says.ok else [{"type": says.error, "message": "scripted"}],
            "timing": {
                "agent": {"start": 1.0, "end": 3.0, "model": {"duration": 1.5}, "harness": {"duration": 0.5}}
            },
        }
    )
    if store is not None:
        trace.info["moorage_payload"] = msgspec.to_builtins(make_payload(says, store, keep=keep))
    return trace


def make_payload(says: Says, store: ScriptedStore, *, keep: bool = True) -> TracePayload:
    branches = []
    if says.trainable and keep and says.ok:
        total = says.prompt_tokens + says.completion_tokens
        for at in range(says.branches):
            spans = (
                NodeSpan(0, 0, says.prompt_tokens, False, -1, 0),
                NodeSpan(at + 1, says.prompt_tokens, total, True, says.prompt_tokens, says.completion_tokens),
            )
            branches.append(
                BranchPayload(
                    branch=at,
                    id=store.keep(),
                    num_tokens=total,
                    num_trainable=says.completion_tokens,
                    fields=("token_ids", "loss_mask", "logprobs")
                    + (("sampling_counts", "sampling_ids") if says.kept_sets else ()),
                    routing=says.routing,
                    nbytes=100,
                    versions=says.versions,
                    spans=spans,
                )
            )
    return TracePayload(URL, STORE, says.detected, tuple(branches))


def make_episode(
    traces: Sequence[Says], task: dict[str, Any], store: ScriptedStore | None, *, ok: bool = True
) -> WireEpisode:
    episode_ok = ok and all(says.ok for says in traces)
    episode = WireEpisode.model_validate({"task": task, "ok": episode_ok, "env": {"id": "scripted"}})
    episode.traces = [make_trace(says, task, store, keep=episode_ok) for says in traces]
    return episode


Behave = Callable[[RolloutCall, int], Awaitable[WireEpisode]]


class ScriptedEnv:
    """An env server: `num_tasks` tasks in order (None: endless), episodes by `behave(call, nth run)`."""

    def __init__(self, store: ScriptedStore, behave: Behave, num_tasks: int | None = 200) -> None:
        self.store = store
        self.behave = behave
        self.num_tasks = num_tasks
        self.streams: dict[str, int] = {}
        self.sampled: list[tuple[str, int]] = []
        self.limits: dict[str, int | None] = {}
        self.closed: list[str] = []
        self.num_runs = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.sample_errors = 0
        self.num_samples = 0
        self.loses_sample: Callable[[int], bool] = lambda nth: False
        self._abandoned: list[WireEpisode] = []

    async def sample(self, stream: str, limit: int | None = None) -> Sampled:
        await asyncio.sleep(0)
        if self.sample_errors:
            self.sample_errors -= 1
            raise EnvServerError("unreachable", "scripted: no answer")
        at = self.streams.get(stream, 0)
        self.streams[stream] = at + 1
        self.num_samples += 1
        if self.loses_sample(self.num_samples):
            raise EnvServerError("unreachable", "scripted: the answer was lost, the stream has moved on")
        self.limits[stream] = limit
        count = min(n for n in (self.num_tasks, limit, 10**9) if n is not None)
        index = at % count
        self.sampled.append((stream, index))
        return Sampled(make_task(index), at // count, index + 1)

    async def restore(self, stream: str, epoch: int, position: int, limit: int | None = None) -> None:
        count = self.num_tasks or 10**9
        self.streams[stream] = epoch * count + position

    async def close_stream(self, stream: str) -> None:
        self.closed.append(stream)

    async def run_rollout(self, call: RolloutCall) -> WireEpisode:
        return (await self._run(call, 1))[0]

    async def run_group(self, call: RolloutCall, n: int) -> list[WireEpisode]:
        return await self._run(call, n)

    async def _run(self, call: RolloutCall, n: int) -> list[WireEpisode]:
        self.num_runs += 1
        nth = self.num_runs
        self.in_flight += n
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        episodes: list[WireEpisode] = []
        try:
            for _ in range(n):
                episodes.append(await self.behave(call, nth))
            return episodes
        except asyncio.CancelledError:
            for (
                episode
            ) in episodes:  # cancelled before its reply: what the server kept is the server's to free
                for payload in read_payloads(episode).values():
                    self.store.release(payload_refs(payload), "env_server")
            raise
        finally:
            self.in_flight -= n

    async def ping(self) -> Ping:
        return Ping({}, self.in_flight, self.store.ledger)

    def take_abandoned(self) -> list[WireEpisode]:
        taken, self._abandoned = self._abandoned, []
        return taken

    async def bye(self) -> Ledger:
        return self.store.ledger

    async def close(self) -> None:
        """Nothing is open."""


class ScriptedEngines:
    """A fleet of one engine that records updates in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.load = 0
        self.peak = 0
        self.update_s = 0.0

    async def update_weights(
        self, path: str | Path, version: int, before_pause: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        assert (Path(path) / "READY").exists()
        if before_pause is not None:
            await before_pause()
        self.calls.append(("pause", version))
        await asyncio.sleep(self.update_s)
        self.calls.append(("resume", version))

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def pick(self, session_key: str) -> str:
        return "http://engine"

    def begin(self, url: str) -> None:
        self.load += 1
        self.peak = max(self.peak, self.load)

    def end(self, url: str) -> None:
        self.load -= 1


class ScriptedTrainer:
    """Takes every READY batch, frees its payloads, and publishes the version it produces."""

    def __init__(
        self,
        run: RunDir,
        store: ScriptedStore,
        *,
        first: int,
        last: int,
        step_s: float = 0.0,
        checkpoint: int = 0,
    ) -> None:
        self.run_dir, self.store = run, store
        self.first, self.last, self.step_s, self.checkpoint = first, last, step_s, checkpoint
        self.trained: list[tuple[int, str]] = []
        self.batches: list[Any] = []

    async def run(self) -> None:
        publish_weights(self.run_dir, self.first - 1, _write_weights)
        for step in range(self.first, self.last + 1):
            while not (self.run_dir.batch(step) / "READY").exists():
                await asyncio.sleep(0.005)
            batch = read_batch(self.run_dir, step, 0)
            await asyncio.sleep(self.step_s)
            self.batches.append(batch)
            self.trained += [(step, s.trace_id) for micro in batch.micro_batches for s in micro.samples]
            self.store.release(owned_slices(batch.micro_batches), "trainer")
            publish_weights(self.run_dir, step, _write_weights)
            if self.checkpoint and (step % self.checkpoint == 0 or step == self.last):
                folder = self.run_dir.checkpoint(step, "trainer")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "READY").touch()


def _write_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def reply_after(
    store: ScriptedStore,
    seconds: Callable[[random.Random], float] = lambda rng: 0.0,
    reward: Callable[[random.Random], float] = lambda rng: float(rng.random() < 0.5),
    seed: int = 0,
    version: Callable[[], int] | None = None,
) -> Behave:
    """Episodes of one trace that take `seconds` and earn `reward`."""
    rng = random.Random(seed)

    async def behave(call: RolloutCall, nth: int) -> WireEpisode:
        start = call.policy_version or 0
        await asyncio.sleep(seconds(rng))
        end = start if version is None else version()
        return make_episode([Says(reward=reward(rng), versions=(start, max(start, end)))], call.task, store)

    return behave
