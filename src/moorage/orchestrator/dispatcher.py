"""Starts episodes, as many as may run, and reports the end of each exactly once.

A thin shell over `opener` (which task next), `groups` (what is owed) and `admission` (who may start): it asks
them, calls the env servers, and puts an `Arrived` or `Cancelled` on `events`. Promises:

- a group's task is sampled once; its episodes are dispatched one by one, each on one permit, or as one
  indivisible run when the environment scores groups;
- every started episode reaches `events` once: as itself, or in its group's single cancellation;
- an infrastructure failure is tried again at most `retries` times, then it is an errored episode;
- payloads of an episode that comes back after its group was dropped are released as `dispatcher`;
- eval work goes first while there is any to start, and ignores the gate; train work waits for the gate;
- a train group is dropped at its deadline; an eval group is not: it ends because each of its runs has one, so
  every pass is measured whole.

`events` is drained by the loop's consumer. It is bounded by what runs: the gate closes when it is
`max_events` long. Does not know rewards, batches or files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.v1 import WireEpisode

from moorage.core.aio import TaskOwner, cancel_and_wait
from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.core.metrics import Counters
from moorage.env.client import RolloutCall
from moorage.orchestrator.admission import Admission
from moorage.orchestrator.environments import Environment, Limits
from moorage.orchestrator.events import (
    INFRA_KINDS,
    Arrived,
    Cancelled,
    Event,
    check_complete,
    check_task,
    failed_episode,
    is_infra_episode,
    read_payloads,
)
from moorage.orchestrator.groups import Cancellation, Group, Groups, Reason, Split, Work
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.opener import Opener
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.policy import Engines, Policy
from moorage.orchestrator.sources import TrainPicker, sampling_request

log = get_logger(__name__)

TICK_S = 0.5


class Dispatcher:
    """Start `run` as a task; stop with `close`."""

    def __init__(
        self,
        train: Mapping[str, Environment],
        evals: Mapping[str, Environment],
        *,
        picker: TrainPicker | None,
        admission: Admission,
        limits: Limits,
        policy: Policy,
        engines: Engines,
        holdings: Holdings,
        outcomes: Outcomes,
        window: Callable[[], int],
        gate: Callable[[], str | None],
        make_id: Callable[[], str],
        on_open: Callable[[str, str, dict[str, Any]], None],
        salt_caches: bool = False,
    ) -> None:
        """`window`: the step that is collecting. `gate`: why train work may not start now, or None. `picker`
        None: there is no train work (stand-alone evaluation). `on_open(group id, source, task)`: of each
        train group. `salt_caches`: runs of different policy versions share no prefix cache (a second guard:
        the fleet clears caches at each update, unless it is told to keep them)."""
        self.environments: dict[Split, Mapping[str, Environment]] = {"train": train, "eval": evals}
        self.admission = admission
        self.groups = Groups(limits.retries)
        self.limits = limits
        self.opener = Opener(
            self.environments,
            self.groups,
            policy,
            limits,
            picker=picker,
            window=window,
            make_id=make_id,
            on_open=on_open,
            on_failed=self._on_unsampled,
        )
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.counters = Counters(self._counter_names())
        self._policy = policy
        self._engines = engines
        self._holdings = holdings
        self._outcomes = outcomes
        self._gate = gate
        self._salt_caches = salt_caches
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._owner = TaskOwner("dispatcher")
        self._wake = asyncio.Event()
        self._waits_for = "nothing"
        self._expire_at = 0.0

    # -- the loop

    async def run(self) -> None:
        """Fill permits for ever. Unblocked by an ending episode, `poke`, or every half second."""
        while True:
            self._owner.check()
            self._wake.clear()
            wait_s = await self._fill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, TICK_S)):
                    await self._wake.wait()

    def poke(self) -> None:
        """Something that was waited for may have happened (gate, eval, cap)."""
        self._wake.set()

    @property
    def waits_for(self) -> str:
        """What keeps it from starting more."""
        return self.opener.asks or self._waits_for

    async def _fill(self) -> float:
        """Start what may start; returns the seconds until the next look."""
        for count in itertools.count(1):
            now = time.monotonic()
            self._drop_expired(now)
            group = self._next_group()
            if group is None:
                return TICK_S
            wait_s = self.admission.wait_s(group.cost, now)
            if wait_s is None:
                self._waits_for = "a permit: an episode that ends"
                return TICK_S
            if wait_s > 0:
                self._waits_for = "the rate limit"
                return wait_s
            if isinstance(group, _ToOpen):
                opened = await self.opener.open(group.split)
                if opened is None:
                    if self.opener.rests:
                        return self.limits.sample_retry_s
                    continue
                group = opened
                if self.groups.get(group.id) is None:
                    continue  # it was dropped while its task was sampled
            self._start(group, now)
            if count % 64 == 0:
                await asyncio.sleep(0)
        return TICK_S

    def _next_group(self) -> Group | _ToOpen | None:
        """The next dispatch: an open group that owes one, else a group to open; eval first."""
        self._waits_for = "nothing to do"
        waiting = self.groups.first_unscheduled("eval")
        if waiting is not None:
            return waiting
        if len(self.opener.slots):
            return _ToOpen("eval", self.opener.cost("eval"))
        if not self.opener.training:
            return None
        reason = self._closed()
        if reason is not None:
            self._waits_for = reason
            return None
        return self.groups.first_unscheduled("train") or _ToOpen("train", self.opener.cost("train"))

    def _closed(self) -> str | None:
        if self.events.qsize() >= self.limits.max_events:
            return "the sinks: finished episodes are waiting to be scored"
        return self._gate()

    # -- one run

    def _on_unsampled(self, group: Group, reason: str) -> None:
        """Report a group that could not begin as errored episodes."""
        while group.owed:
            work = self.groups.dispatch(group)
            self.groups.finish(work)
            self._emit_failed(group, work, "SampleError", reason, infra=True)

    def _start(self, group: Group, now: float) -> None:
        work = self.groups.dispatch(group)
        self.admission.take(group.split, work.num_episodes, now)
        if group.split == "train" and work.attempt == 0:
            self._outcomes.start(work.num_episodes)
        self._tasks[work.id] = self._owner.start(self._run(group, work), f"run {work.id}")

    async def _run(self, group: Group, work: Work) -> None:
        environment = self.environments[group.split][group.source]
        source = environment.source
        started = time.monotonic()
        url = self._engines.pick(group.id)
        version = self._policy.version if group.version is not None else None
        call = RolloutCall(
            task=group.task,
            model=self._policy.model,
            endpoint=url,
            policy_version=version,
            sampling=self._salt(version) | sampling_request(source.sampling),
            deadline_s=source.deadline_s,
        )
        self._engines.begin(url)
        try:
            if group.indivisible:
                episodes = list(await environment.client.run_group(call, work.num_episodes))
            else:
                episodes = [await environment.client.run_rollout(call)]
        except EnvServerError as error:
            self._on_run_failed(group, work, error)
        else:
            self._on_run_ended(group, work, episodes, time.monotonic() - started)
        finally:
            self._engines.end(url)
            self._tasks.pop(work.id, None)
            self._wake.set()

    def _salt(self, version: int | None) -> dict[str, Any]:
        return {"cache_salt": f"version-{version}"} if self._salt_caches and version is not None else {}

    def _on_run_failed(self, group: Group, work: Work, error: EnvServerError) -> None:
        """No episode came: an infrastructure failure is owed again, everything else is final."""
        infra = error.kind in INFRA_KINDS
        if infra and self.groups.retry(work):
            self._on_retry(group, work)
            return
        if self._finish(work) is not None:
            self._emit_failed(group, work, error.kind, str(error), infra=infra)

    def _on_run_ended(self, group: Group, work: Work, episodes: list[WireEpisode], duration_s: float) -> None:
        arrived = []
        for episode in episodes:
            check_task(group, episode)
            check_complete(episode)
            event = Arrived(group, episode, read_payloads(episode), duration_s, is_infra_episode(episode))
            self._holdings.hold(event.payloads, "dispatcher")
            arrived.append(event)
        if any(event.infra for event in arrived) and self.groups.retry(work):
            self._on_retry(group, work)
        elif self._finish(work) is not None:
            for event in arrived:
                self._emit(event)
            return
        for event in arrived:  # superseded by a retry, or its group was dropped meanwhile
            self._holdings.release(event.payloads, "dispatcher")

    def _on_retry(self, group: Group, work: Work) -> None:
        self.admission.release(group.split, work.num_episodes, natural=True)
        self.counters.add(f"retried/{group.split}", work.num_episodes)
        if group.split == "train":
            self._outcomes.retry(work.num_episodes)

    def _finish(self, work: Work) -> Group | None:
        group = self.groups.finish(work)
        if group is not None:
            self.admission.release(group.split, work.num_episodes, natural=True)
        return group

    def _emit_failed(self, group: Group, work: Work, kind: str, message: str, *, infra: bool) -> None:
        for _ in range(work.num_episodes):
            episode = failed_episode(group.task, group.source, kind, message)
            self._emit(Arrived(group, episode, infra=infra))

    def _emit(self, event: Arrived) -> None:
        if not event.episode.ok:
            self.counters.add(f"errored/{event.group.split}")
            self.counters.add(f"errored/{event.group.split}/{event.group.source}")
        self.events.put_nowait(event)

    # -- dropping groups

    async def drop_stale(self, min_fresh: int) -> int:
        """Cancel train groups that began before version `min_fresh`, and wait until that is answered."""
        return await self._drop(self.groups.stale(min_fresh), "stale")

    async def cut(self, num_episodes: int) -> int:
        """Cancel the youngest train groups until `num_episodes` running episodes are gone."""
        return await self._drop(self.groups.youngest(num_episodes), "overload")

    async def cancel_train(self) -> int:
        """End all train work: the last batch has shipped. Eval goes on."""
        self.opener.end_training()
        return await self._drop([group.id for group in self.groups if group.split == "train"], "shutdown")

    def _drop_expired(self, now: float) -> None:
        """However busy the loop is; looked for every half second."""
        if now < self._expire_at:
            return
        self._expire_at = now + TICK_S
        expired = self.groups.expired(now)
        tasks = [task for group_id in expired for task in self._forget(group_id, "deadline")]
        if tasks:
            self._owner.start(_cancel_all(tasks), "cancel expired")

    async def _drop(self, group_ids: Sequence[str], reason: Reason) -> int:
        tasks = [task for group_id in group_ids for task in self._forget(group_id, reason)]
        await _cancel_all(tasks)
        self._wake.set()
        return len(tasks)

    def _forget(self, group_id: str, reason: Reason) -> list[asyncio.Task[None]]:
        """Synchronously: remove the group, give its permits back, report it. Returns the tasks to cancel."""
        cancellation = self.groups.drop(group_id, reason)
        if cancellation is None:
            return []
        group = cancellation.group
        self._give_up(cancellation)
        self.counters.add(f"cancelled/{group.split}", cancellation.count)
        self.counters.add(f"cancelled/{group.split}/{group.source}", cancellation.count)
        self.events.put_nowait(Cancelled(cancellation))
        return [self._tasks[work.id] for work in cancellation.works if work.id in self._tasks]

    # -- state and end

    @property
    def is_idle(self) -> bool:
        """Nothing runs, nothing waits to be consumed, no eval is to be started."""
        return not len(self.groups) and self.events.empty() and not len(self.opener.slots)

    async def close(self) -> None:
        """Cancel every run and wait for the answers. Puts no event."""
        for group in list(self.groups):
            cancellation = self.groups.drop(group.id, "shutdown")
            if cancellation is not None:
                self._give_up(cancellation)
        await self._owner.close()

    def _give_up(self, cancellation: Cancellation) -> None:
        group = cancellation.group
        if cancellation.num_running:
            self.admission.release(group.split, cancellation.num_running, natural=False)
        if group.split == "train":
            self._outcomes.cancel(cancellation.num_started)

    def metrics(self) -> dict[str, float]:
        """Gauges now, and counts since the last call."""
        versions = [g.version for g in self.groups if g.split == "train" and g.version is not None]
        lags = [self._policy.version - version for version in versions]
        values: dict[str, float] = {
            "dispatcher/inflight/train": self.groups.in_flight("train"),
            "dispatcher/inflight/eval": self.groups.in_flight("eval"),
            "dispatcher/queued/eval": len(self.opener.slots),
            "dispatcher/queued/events": self.events.qsize(),
            "dispatcher/mode": float(bool(len(self.opener.slots) or self.groups.first_unscheduled("eval"))),
            "dispatcher/off_policy/max": max(lags, default=0),
            "dispatcher/off_policy/mean": sum(lags) / len(lags) if lags else 0.0,
            "concurrency/max_inflight": self.admission.cap,
        }
        return values | {f"dispatcher/{name}": count for name, count in self.counters.take().items()}

    def _counter_names(self) -> list[str]:
        names = ["retried/train", "retried/eval"]
        for what in ("cancelled", "errored"):
            for split, environments in self.environments.items():
                names.append(f"{what}/{split}")
                names += [f"{what}/{split}/{name}" for name in environments]
        return names


@dataclass(frozen=True)
class _ToOpen:
    """A group that is not sampled yet; `cost` permits are wanted before its task is."""

    split: Split
    cost: int


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*(cancel_and_wait(task) for task in tasks))
