"""One attempt of an orchestrator: its parts, and the loops that move episodes through them.

`Orchestrator` is given parts that are connected already; `loop` makes them from a configuration, tests from
scripted ones. See `loop` for the table of loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, cast

from verifiers.v1 import WireEpisode

from moorage.config.orchestrator import OrchestratorConfig
from moorage.config.run import OrchestratorProcessConfig
from moorage.core.aio import TaskOwner
from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir
from moorage.env.provenance import stamp
from moorage.orchestrator.environments import Environment, read_ledgers, release_abandoned
from moorage.orchestrator.episodes import EpisodeLog
from moorage.orchestrator.events import Arrived, Event, episodes_of
from moorage.orchestrator.lag import LoopLag
from moorage.orchestrator.measuring import Measuring
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.parts import Parts, make_dispatcher, make_schedule, make_sink
from moorage.orchestrator.payloads import span_of
from moorage.orchestrator.policy import Policy, PolicyWatcher
from moorage.orchestrator.progress import (
    STATE_VERSION,
    OpenTask,
    Progress,
    State,
    Unfinished,
    encode_state,
)
from moorage.orchestrator.reporter import Reporter, Watched
from moorage.orchestrator.ship import Shipper, clean_up, load_cost
from moorage.orchestrator.sink_records import Batch
from moorage.orchestrator.stall import StallReporter
from moorage.orchestrator.step_metrics import advance, window_sizes

log = get_logger(__name__)

PING_S = 1.0


class Orchestrator:
    """Use `run` once."""

    def __init__(self, config: OrchestratorProcessConfig, parts: Parts) -> None:
        self.config = config
        self.parts = parts
        self.settings: OrchestratorConfig = config.orchestrator
        self.run_dir = RunDir(config.facts.run_dir)
        state = parts.state
        self.progress = state.progress if state else Progress()
        self.progress.step = state.step + 1 if state else 1
        self.outcomes = Outcomes(state.counts if state else None)
        self.unfinished = Unfinished()
        self.policy = Policy(config.model.name, parts.live_version)
        self.trainer_watch = PeerWatch(self.run_dir, "trainer")
        self.sink = make_sink(config, parts, self.outcomes, on_settled=self.unfinished.settle)
        self.dispatcher = make_dispatcher(
            config,
            parts,
            self.policy,
            self.outcomes,
            window=lambda: self.progress.step,
            gate=self._gate,
            on_open=self.unfinished.open,
        )
        if self.progress.step > config.facts.max_steps:
            self.dispatcher.opener.end_training()  # what is left is to measure
        self.watcher = PolicyWatcher(
            self.run_dir,
            self.policy,
            parts.engines,
            last_version=config.facts.max_steps,
            watch=self.trainer_watch,
            before_pause=self._before_pause,
            on_live=self._on_live,
        )
        self.shipper = Shipper(
            self.run_dir,
            config.facts,
            config.checkpoint,
            num_data_ranks=config.num_data_ranks,
            cost=load_cost(config.model.path),
        )
        self.episodes = EpisodeLog(self.run_dir)
        self.lag = LoopLag()
        self.stall = StallReporter(self.awaits)
        self.ship_waits_for = ""
        self.consumer_waits_for = ""
        self._owner = TaskOwner("orchestrator")
        self._changed = asyncio.Event()
        self.measuring = Measuring(
            self.run_dir,
            parts.evals,
            parts.eval_sizes,
            make_schedule(config, parts),
            parts.measured,
            parts.holdings,
            parts.monitor,
            self._owner,
            on_end=self._on_measured,
        )
        watched = Watched(
            parts.monitor,
            self.episodes,
            self.dispatcher,
            self.watcher,
            parts.holdings,
            self.outcomes,
            self.lag,
        )
        self.reporter = Reporter(
            watched, list(parts.train), wandb=config.monitor.wandb, seed=config.facts.seed
        )
        self._cleaning: asyncio.Task[None] | None = None

    # -- the run

    async def run(self, stop: asyncio.Event) -> bool:
        """Until the last step and the last measurement, or `stop`. True when the work is done.

        Raises what a loop raised. Whatever the ending, everything held is released and all runs are
        cancelled.
        """
        self._owner.start(self.parts.holdings.run(), "releases", forever=True)
        self._owner.start(self.episodes.run(), "episodes", forever=True)
        self._owner.start(self.lag.run(), "lag", forever=True)
        self._owner.start(self.stall.run(), "stall", forever=True)
        self._owner.start(self._ping(), "ping", forever=True)
        self._owner.start(self.parts.engines.watch(), "engines", forever=True)
        self._owner.start(self._consume(), "consume", forever=True)
        self._owner.start(self.dispatcher.run(), "dispatch", forever=True)
        self.measuring.begin(self.dispatcher, self.parts.live_version)
        self._owner.start(self._watch_trainer(), "watch trainer")
        watching = self._owner.start(self.watcher.run(), "policy")
        work = self._owner.start(self._work(watching), "ship")
        try:
            return await self._until(work, stop)
        finally:
            await self._close()

    async def _until(self, work: asyncio.Task[None], stop: asyncio.Event) -> bool:
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(self._owner.wait_failed())
        try:
            await asyncio.wait({work, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            self._owner.check()
            return work.done()
        finally:
            for task in (stopping, failing):
                task.cancel()
            await asyncio.gather(stopping, failing, return_exceptions=True)

    async def _work(self, watching: asyncio.Task[None]) -> None:
        """Ship every step; then let the trainer finish, and the last measurement."""
        await self._ship_all()
        await self.dispatcher.cancel_train()
        self.ship_waits_for = f"the trainer: policy version {self.config.facts.max_steps}"
        await watching
        await self._clean_up(self.policy.version)
        self.ship_waits_for = "eval episodes"
        while not self.measuring.is_whole or not self.dispatcher.is_idle:
            self._changed.clear()
            await self._wait_changed()
        self.ship_waits_for = ""

    async def _ship_all(self) -> None:
        facts = self.config.facts
        while self.progress.step <= facts.max_steps:
            step = self.progress.step
            self._changed.clear()
            if not self.sink.is_ready:
                self.ship_waits_for = f"scored traces for step {step}: {self.sink.num_waiting} wait"
                await self._wait_changed()
                continue
            self.ship_waits_for = f"the trainer: policy version {step - 1 - self.settings.max_ahead}"
            held = time.monotonic()
            await self.watcher.wait_live(step - 1 - self.settings.max_ahead)
            batch = self.sink.cut(step)
            if batch is not None:
                self.ship_waits_for = f"the run folder: batch {step}"
                await self._ship(batch, time.monotonic() - held)
            self.dispatcher.poke()

    async def _wait_changed(self) -> None:
        """Unblocked by the consumer, or looks again after a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _ship(self, batch: Batch, held_s: float) -> None:
        """The cut ends the window: what arrives from here on belongs to the next step."""
        sizes = window_sizes(batch.window)
        advance(self.progress, sizes)
        self.reporter.log_effective(batch)
        state = encode_state(self.make_state(batch.step))
        write = asyncio.ensure_future(asyncio.to_thread(self.shipper.write, batch, state))
        try:
            written = await asyncio.shield(write)
        except asyncio.CancelledError:
            await write  # a batch that was cut becomes READY
            self.sink.shipped(batch)
            raise
        self.sink.shipped(batch)
        self.reporter.log_step(batch, sizes, self.progress, written, held_s)
        self.stall.moved()
        self.dispatcher.poke()

    # -- consuming

    async def _consume(self) -> None:
        """Route every event to its sink."""
        while True:
            event = await self.dispatcher.events.get()
            self.consumer_waits_for = f"the algorithm of `{event.group.source}`"
            await self._take(event)
            self.consumer_waits_for = ""
            self._changed.set()
            self.dispatcher.poke()

    async def _take(self, event: Event) -> None:
        group = event.group
        step = self.progress.step if group.split == "train" else group.step
        for episode in episodes_of(event):
            self._stamp(episode, event, step)
            self.episodes.add(step, group.split, "all", episode)
        if group.split == "eval":
            self.measuring.sink.add(event)
            return
        await self.sink.add(event)

    def _stamp(self, episode: WireEpisode, event: Event, step: int) -> None:
        group = event.group
        payloads = event.payloads.values() if isinstance(event, Arrived) else ()
        stamp(
            cast(Any, episode),  # verifiers' generics are invariant
            env_name=group.source,
            group_id=group.id,
            run_id=self.config.facts.run_id,
            run_name=self.run_dir.root.name,
            split=group.split,
            step=step,
            span=span_of(payloads) if group.version is not None else None,
        )

    # -- policy

    def _gate(self) -> str | None:
        """Why no train work may start now."""
        lead = self.progress.step - 1 - self.policy.version
        if lead > self.settings.max_ahead:
            return f"the trainer: {lead} batches are ahead of policy version {self.policy.version}"
        if self.sink.batches_waiting(self.settings.max_waiting) >= 1:
            return f"the ship path: {self.sink.num_waiting} scored traces wait for a batch"
        return None

    async def _before_pause(self) -> None:
        await self.dispatcher.drop_stale(self.progress.step - 1 - self.settings.max_off_policy_steps)

    def _on_live(self, version: int) -> None:
        self.measuring.begin(self.dispatcher, version)
        self.dispatcher.poke()
        self._changed.set()
        if self._cleaning is None or self._cleaning.done():
            self._cleaning = self._owner.start(self._clean_up(version), "clean up")

    async def _clean_up(self, version: int) -> None:
        retain = self.config.payload.retain == "checkpoint"
        await asyncio.to_thread(clean_up, self.run_dir, version, retain_batches=retain)

    def _on_measured(self) -> None:
        self.stall.moved()
        self._changed.set()

    async def _watch_trainer(self) -> None:
        """End with the trainer, also while nothing waits for a file of its."""
        while self.policy.version < self.config.facts.max_steps:
            await asyncio.sleep(1.0)
            self.trainer_watch.check()

    # -- state

    def make_state(self, step: int) -> State:
        """What a resume after `step` continues from."""
        return State(
            version=STATE_VERSION,
            step=step,
            progress=self.progress,
            counts=self.outcomes.snapshot(),
            sources=tuple(self.parts.train),
            num_picked=self.dispatcher.opener.num_picked,
            streams=dict(self.dispatcher.opener.cursors.streams),
            open_tasks=tuple(OpenTask(*each) for each in self.dispatcher.opener.requeued_tasks)
            + self.unfinished.tasks,
            algorithms={name: each.algorithm.state() for name, each in self.sink.settings.items()},
        )

    def awaits(self) -> dict[str, str]:
        """Which loop waits for what."""
        return {
            "ship": self.ship_waits_for,
            "dispatch": self.dispatcher.waits_for,
            "consume": self.consumer_waits_for,
        }

    # -- env servers, and the end

    async def _ping(self) -> None:
        """Read the ledgers, and take back what became ours while its run was being cancelled."""
        while True:
            await asyncio.sleep(PING_S)
            release_abandoned(self._environments, self.parts.holdings)
            with contextlib.suppress(EnvServerError):  # a dead server ends its own calls, which says more
                self.reporter.ledger = await read_ledgers(self._environments)

    @property
    def _environments(self) -> list[Environment]:
        return [*self.parts.train.values(), *self.parts.evals.values()]

    async def _close(self) -> None:
        """In order: no new runs, cancel those under way, drop what waits, release, write the last lines."""
        await self._owner.close()
        await self.dispatcher.close()
        release_abandoned(self._environments, self.parts.holdings)
        self._drain_events()
        self.sink.close()
        await self.parts.holdings.close()
        await self.episodes.close()
        with contextlib.suppress(EnvServerError, TimeoutError):
            async with asyncio.timeout(5.0):
                self.reporter.ledger = await read_ledgers(self._environments)
        step = min(self.progress.step, self.config.facts.max_steps)
        self.reporter.log_last(step)

    def _drain_events(self) -> None:
        """Episodes that no sink took: counted; their payloads are still held and go as `shutdown`."""
        while not self.dispatcher.events.empty():
            event = self.dispatcher.events.get_nowait()
            if event.group.split != "train" or not isinstance(event, Arrived):
                continue
            if event.episode.ok:
                self.outcomes.arrive()
                self.outcomes.drop("shutdown")
            else:
                self.outcomes.error()
