"""`moorage eval`: measures a model on environments, without a training run.

Against an endpoint, or a checkpoint folder for which an engine is started as a child; env servers are started
as children as well. The folder of a measurement is a run folder:

    config.json                            what was asked; another question in the same folder is refused
    episodes/step_V/eval/all/traces.jsonl  one line per final episode, written as they end
    results.json                           all figures per source

Started again it reads the lines, runs only what is missing (and what an infrastructure failure spoiled), and
ends with the same table as a measurement that was never interrupted. Every payload is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import uuid
from typing import Any, cast

from moorage.config.base import make_config
from moorage.config.evaluation import EvaluationConfig
from moorage.config.orchestrator import OrchestratorConfig
from moorage.core.aio import TaskOwner
from moorage.core.errors import ConfigError, EnvServerError
from moorage.core.log import get_logger, setup_logging
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, PeerWatch, RunDir, read_json, write_json_atomic
from moorage.core.secret import TOKEN_VARIABLE
from moorage.engine.fleet import Fleet
from moorage.env.provenance import stamp
from moorage.orchestrator.admission import Admission
from moorage.orchestrator.connect import Identity, check_eval_size, connect_source
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.environments import Environment, Limits, release_abandoned
from moorage.orchestrator.episodes import EpisodeLog
from moorage.orchestrator.eval_progress import Progress
from moorage.orchestrator.eval_servers import Servers
from moorage.orchestrator.eval_sink import EvalSink
from moorage.orchestrator.events import Event, episodes_of
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.policy import Policy
from moorage.orchestrator.results import Earlier, read_earlier, render_results, whole_sizes
from moorage.orchestrator.sources import EvalPass, Source, resolve_eval
from moorage.payload.client import PayloadClient
from moorage.records.payload import Ledger

log = get_logger(__name__)


def main(config: EvaluationConfig) -> int:
    """Measure. 0: the table is complete; 130 or 143: interrupted, the same command goes on."""
    setup_logging("eval")
    watch_parent()
    run = RunDir(os.path.join(config.output_dir, config.name))
    claim_folder(run, config)
    with Heartbeat(run, "eval"):
        return asyncio.run(_main(config, run))


def claim_folder(run: RunDir, config: EvaluationConfig) -> None:
    """Note the question in the folder. Raises ConfigError when another one was asked there before."""
    question = config.model_dump(
        mode="json", exclude={"name", "output_dir", "max_inflight", "retries", "inference"}
    )
    before = read_json(run.root / "config.json")
    if before is not None and before != question:
        changed = sorted(key for key in question if before.get(key) != question[key])
        raise ConfigError(
            f"{run.root} holds a measurement with other settings ({', '.join(changed)}); choose another "
            "`name`, or remove the folder"
        )
    write_json_atomic(run.root / "config.json", question)


async def _main(config: EvaluationConfig, run: RunDir) -> int:
    received: list[int] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, lambda number=signum: (received.append(number), stop.set()))
    token = _token(config)
    servers = Servers(config, run, token)
    try:
        servers.start()
        work = asyncio.create_task(_measure(config, run, token, servers, stop))
        guard = asyncio.create_task(servers.watch())
        await asyncio.wait({work, guard}, return_when=asyncio.FIRST_COMPLETED)
        if guard.done() and not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            guard.result()
        guard.cancel()
        done = work.result()
    finally:
        await asyncio.to_thread(servers.stop)
    if not done:
        print("interrupted; the same command measures what is missing", file=sys.stderr)
        return 128 + received[0]
    return 0


def _token(config: EvaluationConfig) -> str:
    """The secret: a new one, unless an env server that somebody else runs has its own."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    foreign = [source.name for source in config.sources if source.address]
    if foreign:
        raise ConfigError(
            f"sources {foreign} have an address: set {TOKEN_VARIABLE} to the token of their env servers"
        )
    return secrets.token_hex(32)


async def _measure(
    config: EvaluationConfig, run: RunDir, token: str, servers: Servers, stop: asyncio.Event
) -> bool:
    """Connect, measure, say goodbye. True when every pass is whole."""
    identity = Identity(token, servers.run_id, 1)
    fleet = Fleet([servers.endpoint], config.model.name)
    client = PayloadClient(token, run_dir=str(run))
    sources = resolve_eval(as_orchestrator(config))
    environments: dict[str, Environment] = {}
    sizes: dict[str, int] = {}
    try:
        for source, source_config in zip(sources, config.sources, strict=True):
            environments[source.name], hello = await connect_source(
                run, source, source_config, identity, num_replicas=1, watch=PeerWatch(run, "eval")
            )
            sizes[source.name] = check_eval_size(source, hello)
        await fleet.wait_ready(config.inference.ready_timeout_s)
        if config.endpoint is None:
            await fleet.label(config.version)
        evaluation = Evaluation(config, run, environments, sizes, fleet, Holdings(client))
        done = await evaluation.run(stop)
        for environment in environments.values():
            with contextlib.suppress(EnvServerError):
                _log_payloads(environment.source.name, await environment.client.bye())
        return done
    finally:
        for environment in environments.values():
            await environment.client.close()
        await fleet.close()
        await asyncio.to_thread(client.close)


def _log_payloads(source: str, ledger: Ledger) -> None:
    """The line at the end: everything that was kept must have been freed."""
    freed = sum(ledger.freed.values())
    log.info("%s: %d payloads kept, %d freed, %d left", source, ledger.kept, freed, ledger.outstanding)


def as_orchestrator(config: EvaluationConfig) -> OrchestratorConfig:
    """The same question as a training run's eval block, so that inheritance is resolved in one place."""
    largest = max([config.group_size, *(source.group_size or 0 for source in config.sources)])
    data = {
        "eval": {"sources": config.sources, "group_size": config.group_size, "sampling": config.sampling},
        "group_size": 1,
        "max_inflight": max(config.max_inflight, largest),
        "retries": config.retries,
    }
    return make_config(OrchestratorConfig, data)


class Evaluation:
    """One measurement over connected parts. Use `run` once."""

    def __init__(
        self,
        config: EvaluationConfig,
        run: RunDir,
        environments: dict[str, Environment],
        sizes: dict[str, int],
        engines: Fleet,
        holdings: Holdings,
    ) -> None:
        self.config = config
        self.run_dir = run
        self.environments = environments
        self.sizes = sizes
        self.holdings = holdings
        self.results: dict[str, dict[str, float]] = {}
        self.num_done = 0
        self.sink = EvalSink(holdings, on_pass=self._on_pass)
        self.episodes = EpisodeLog(run)
        self.dispatcher = Dispatcher(
            {},
            environments,
            picker=None,
            admission=Admission(as_orchestrator(config).max_inflight),
            limits=Limits(config.retries, max_events=config.max_inflight),
            policy=Policy(config.model.name, config.version),
            engines=engines,
            holdings=holdings,
            outcomes=Outcomes(),
            window=lambda: 0,
            gate=lambda: None,
            make_id=lambda: uuid.uuid4().hex,
            on_open=lambda *_: None,
        )
        self._owner = TaskOwner("evaluation")

    async def run(self, stop: asyncio.Event) -> bool:
        """Until every pass is whole, or `stop`. Writes results.json and prints the table when whole."""
        earlier = read_earlier(self.run_dir, self.config.version, whole_sizes(self.environments.values()))
        passes = [self._begin(each.source, earlier) for each in self.environments.values()]
        self.dispatcher.opener.slots.add(passes)
        self._owner.start(self.holdings.run(), "releases", forever=True)
        self._owner.start(self.episodes.run(), "episodes", forever=True)
        self._owner.start(self.dispatcher.run(), "dispatch", forever=True)
        total = sum(self.sizes[name] * each.source.group_size for name, each in self.environments.items())
        progress = Progress(total, lambda: (self.num_done, self.dispatcher.groups.in_flight("eval")))
        self._owner.start(progress.run(), "progress", forever=True)
        work = self._owner.start(self._collect(), "collect")
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(self._owner.wait_failed())
        try:
            await asyncio.wait({work, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            self._owner.check()
        finally:
            for task in (stopping, failing):
                task.cancel()
            await self._close()
            progress.close()
        if self.sink.open_passes:
            return False
        path = self.run_dir.root / "results.json"
        write_json_atomic(path, self.results)
        print(render_results(self.results), flush=True)
        log.info("all figures: %s", path)
        return True

    def _begin(self, source: Source, earlier: Earlier) -> EvalPass:
        pass_ = earlier.continued(source, self.config.version, self.sizes[source.name])
        kept = earlier.of(source.name)
        self.num_done += len(kept)
        if kept:
            log.info("%s: %d episodes are there already", source.name, len(kept))
        self.sink.begin(pass_, kept)
        return pass_

    async def _collect(self) -> None:
        while self.sink.open_passes:
            self._take(await self.dispatcher.events.get())

    def _take(self, event: Event) -> None:
        for episode in episodes_of(event):
            stamp(
                cast(Any, episode),  # verifiers' generics are invariant
                env_name=event.group.source,
                group_id=event.group.id,
                run_id=self.config.name,
                split=None,
            )
            self.episodes.add(self.config.version, "eval", "all", episode)
            self.num_done += 1
        self.sink.add(event)

    def _on_pass(self, pass_: EvalPass, metrics: dict[str, float]) -> None:
        prefix = f"eval/{pass_.source.name}/"
        self.results[pass_.source.name] = {
            name.removeprefix(prefix): metrics[name] for name in sorted(metrics)
        }

    async def _close(self) -> None:
        await self._owner.close()
        await self.dispatcher.close()
        release_abandoned(self.environments.values(), self.holdings)
        while not self.dispatcher.events.empty():
            self._take(self.dispatcher.events.get_nowait())
        await self.holdings.close()
        await self.episodes.close()
