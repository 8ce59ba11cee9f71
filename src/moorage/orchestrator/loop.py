"""The orchestrator process.

Each loop: what it consumes -> what it produces; what it waits for / who unblocks it.

| loop          | consumes -> produces                     | waits for / unblocked by                        |
|---------------|------------------------------------------|-------------------------------------------------|
| dispatch      | tasks, permits -> episodes on `events`   | a permit / an ending episode; a task / the env  |
|               |                                          | server; the gate / a live version, a batch      |
|               |                                          | (looks again every 0.5 s)                       |
| consume       | `events` -> scored traces, eval figures, | an event / dispatch; a scoring hook / the       |
|               | episode lines                            | algorithm                                       |
| ship          | scored traces -> batch files, checkpoint | a full batch / consume (looks again every 1 s); |
|               | parts, metrics rows                      | version step - 1 - max_ahead / policy           |
| policy        | weights in the run folder -> engines on  | READY of a newer version / the trainer, or its  |
|               | a new version, due evals                 | death (`PeerWatch`)                             |
| releases      | dropped payloads -> deletes              | something to delete / dispatch, the sinks       |
| episodes      | episodes -> traces.jsonl                 | 0.2 s / the clock                               |
| ping          | -> ledgers, abandoned payloads           | 1 s / the clock; answers / its own deadline    |
| engines       | gauges -> choice among replicas          | 1 s / the clock; 60 s of silence end the run    |
| watch trainer | heartbeat, END.json -> the end           | 1 s / the clock                                 |
| stall, lag    | what the others await -> a log line      | the clock                                       |
|               | after 60 s without movement; loop lag    |                                                 |

The gate is closed while more than `max_ahead` batches are ahead of the live version, while four batches of
scored traces wait, and while `events` is full; so every buffer is bounded by the cap and the batch size.
`max_steps` shipped: train work is cancelled, the last version is awaited, the last measurement completes.
SIGTERM: runs are cancelled, everything held is released as `shutdown`, exit code 143.
"""

from __future__ import annotations

import asyncio
import os
import signal

from moorage.config.run import OrchestratorProcessConfig
from moorage.core.collector import settle_collector
from moorage.core.errors import ConfigError, MoorageError
from moorage.core.log import get_logger, setup_logging
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, PeerWatch, RunDir
from moorage.core.secret import TOKEN_VARIABLE
from moorage.engine.fleet import Fleet
from moorage.exchange.batches import newest_batch, read_checkpoint_state, read_owned_slices, read_state
from moorage.monitor.setup import make_monitor
from moorage.orchestrator.connect import Identity, check_eval_size, connect_source
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.measuring import read_measured
from moorage.orchestrator.parts import Parts
from moorage.orchestrator.policy import Policy, PolicyWatcher
from moorage.orchestrator.progress import State, decode_state
from moorage.orchestrator.run import Orchestrator
from moorage.orchestrator.sources import resolve_eval, resolve_train
from moorage.payload.client import PayloadClient

log = get_logger(__name__)

EXIT_STOPPED = 128 + signal.SIGTERM


def main(config: OrchestratorProcessConfig) -> int:
    """Run one attempt. 0: all steps shipped and measured; 143: stopped; 1: failed, the log says why."""
    setup_logging("orchestrator")
    watch_parent()
    run = RunDir(config.facts.run_dir)
    if config.facts.start_step > config.facts.max_steps and not missing_measurements(config, run):
        log.info("step %d of %d is done already", config.facts.start_step - 1, config.facts.max_steps)
        return 0
    with Heartbeat(run, "orchestrator"):
        try:
            return asyncio.run(_main(config, run))
        except MoorageError as error:
            log.error("%s: %s", type(error).__name__, error)
            return 1


async def _main(config: OrchestratorProcessConfig, run: RunDir) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    working = asyncio.create_task(run_attempt(config, run, stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    done = await working
    if done:
        log.info("%d steps shipped", config.facts.max_steps)
        return 0
    log.info("stopped")
    return EXIT_STOPPED


async def run_attempt(config: OrchestratorProcessConfig, run: RunDir, stop: asyncio.Event) -> bool:
    """Connect to everything, run, and give everything back. True when all steps are done."""
    identity = Identity(_read_token(), config.facts.run_id, config.facts.attempt)
    fleet = Fleet(config.engine_urls, config.model.name, keep_cache=config.keep_cache)
    client = PayloadClient(identity.token, run_dir=config.facts.run_dir)
    monitor = make_monitor(config.monitor, run, "orchestrator", config.facts.run_id)
    environments: dict[tuple[str, str], tuple] = {}
    try:
        setup = asyncio.create_task(_set_up(config, run, identity, fleet, environments))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({setup, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not setup.done():
            setup.cancel()
            await asyncio.gather(setup, return_exceptions=True)
            return False
        state, live_version = setup.result()
        settle_collector()
        evals = {name: each for (split, name), each in environments.items() if split == "eval"}
        parts = Parts(
            train={name: each[0] for (split, name), each in environments.items() if split == "train"},
            evals={name: each[0] for name, each in evals.items()},
            eval_sizes={name: check_eval_size(each[0].source, each[1]) for name, each in evals.items()},
            engines=fleet,
            holdings=Holdings(client),
            monitor=monitor,
            state=state,
            live_version=live_version,
            measured=read_measured(run, evals),
        )
        return await Orchestrator(config, parts).run(stop)
    finally:
        for environment, _ in environments.values():
            await environment.client.close()
        await fleet.close()
        await asyncio.to_thread(client.close)
        monitor.close()


async def _set_up(
    config: OrchestratorProcessConfig,
    run: RunDir,
    identity: Identity,
    fleet: Fleet,
    environments: dict[tuple[str, str], tuple],
) -> tuple[State | None, int]:
    """Env servers, state, engines. Fills `environments`; returns the state to resume from, and the version
    that is live."""
    settings, facts = config.orchestrator, config.facts
    trainer = PeerWatch(run, "trainer")
    state = load_state(config, run)
    adopt = [each.id for each in read_owned_slices(run, facts.start_step)] if state is not None else []
    resolved = [*zip(resolve_train(settings), settings.train, strict=True)]
    resolved += [*zip(resolve_eval(settings), settings.eval.sources, strict=True)]
    for source, source_config in resolved:
        environments[source.split, source.name] = await connect_source(
            run,
            source,
            source_config,
            identity,
            num_replicas=config.env_replicas,
            watch=trainer,
            adopt=adopt,
        )
    for stream, (epoch, position) in (state.streams if state else {}).items():
        environment = environments["train", stream.split("/", 1)[1]][0]
        await environment.client.restore(stream, epoch, position)
    await fleet.wait_ready(config.ready_timeout_s)
    return state, await bring_live(config, run, fleet, trainer)


def missing_measurements(config: OrchestratorProcessConfig, run: RunDir) -> list[str]:
    """Eval sources that no attempt has measured whole at the last version."""
    names = [str(source.name) for source in config.orchestrator.eval.sources]
    measured = read_measured(run, names)
    return [name for name in names if measured.get(name) != config.facts.max_steps]


async def bring_live(config: OrchestratorProcessConfig, run: RunDir, fleet: Fleet, trainer: PeerWatch) -> int:
    """Have the engines hold the version that the attempt starts from, or a newer one; which it is.

    Only engines of our own, at the first step, hold it already: they were started from the model that version
    0 is. Engines of somebody else may hold anything, and may be paused.
    """
    version = config.facts.start_step - 1
    if version == 0 and not config.foreign_engines:
        await fleet.label(0)
        return 0
    policy = Policy(config.model.name, -1)
    watcher = PolicyWatcher(
        run,
        policy,
        fleet,
        last_version=config.facts.max_steps,
        watch=trainer,
        before_pause=_nothing,
        on_live=lambda _: None,
    )
    await watcher.first(version)
    return policy.version


def load_state(config: OrchestratorProcessConfig, run: RunDir) -> State | None:
    """The state that this attempt continues from: the checkpoint's, or with retained batches that of the
    newest READY batch after it. None at the first step."""
    start = config.facts.start_step
    names = tuple(str(source.name) for source in config.orchestrator.train)
    newest = newest_batch(run) if config.payload.retain == "checkpoint" else None
    if newest is not None and newest >= start:
        log.info("continuing after the retained batch of step %d", newest)
        return decode_state(read_state(run, newest), names)
    if start == 1:
        return None
    return decode_state(read_checkpoint_state(run.checkpoint(start - 1, "orchestrator")), names)


async def _nothing() -> None:
    """Before the first dispatch there is nothing to cancel."""


def _read_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set: it holds the run's secret, which the launcher makes; started by "
            "hand, set it to the token that the env servers were started with"
        )
    return token
