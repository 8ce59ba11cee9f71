"""What an attempt of the orchestrator is made of, put together from its configuration and its last state."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.config.run import OrchestratorProcessConfig
from moorage.monitor.fanout import Fanout
from moorage.orchestrator.admission import Admission
from moorage.orchestrator.algorithms.registry import resolve_algorithm
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.environments import Environment, Limits
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.policy import Engines, Policy
from moorage.orchestrator.progress import State
from moorage.orchestrator.sink_records import SinkLimits, TrainSettings
from moorage.orchestrator.sources import EvalSchedule, TrainPicker
from moorage.orchestrator.train_sink import TrainSink


@dataclass(frozen=True)
class Parts:
    """What an attempt needs from outside, connected and ready."""

    train: Mapping[str, Environment]
    evals: Mapping[str, Environment]
    eval_sizes: Mapping[str, int]
    engines: Engines
    holdings: Holdings
    monitor: Fanout
    state: State | None = None
    live_version: int = 0
    measured: Mapping[str, int] = field(default_factory=dict)
    """Source to the newest version that earlier attempts measured whole."""

    make_id: Callable[[], str] = lambda: uuid.uuid4().hex


def make_sink(
    config: OrchestratorProcessConfig,
    parts: Parts,
    outcomes: Outcomes,
    *,
    on_settled: Callable[[str], None],
) -> TrainSink:
    """The sink; its algorithms go on where the last state left them."""
    state = parts.state
    settings = {}
    for name, environment in parts.train.items():
        source = environment.source
        algorithm = resolve_algorithm(source.algorithm)
        if state is not None and name in state.algorithms:
            algorithm.restore(state.algorithms[name])
        sampling = source.sampling
        settings[name] = TrainSettings(algorithm, sampling.temperature, source.group_size, sampling.truncated)
    block = config.orchestrator
    limits = SinkLimits(
        seq_len=config.facts.seq_len,
        max_off_policy=block.max_off_policy_steps,
        batch_traces=block.traces_per_batch,
        batch_tokens=block.token_batch_size,
        drop=block.drop,
        require_routing=config.require_routing,
    )
    return TrainSink(settings, limits, parts.holdings, outcomes, on_settled=on_settled)


def make_dispatcher(
    config: OrchestratorProcessConfig,
    parts: Parts,
    policy: Policy,
    outcomes: Outcomes,
    *,
    window: Callable[[], int],
    gate: Callable[[], str | None],
    on_open: Callable[[str, str, dict[str, Any]], None],
) -> Dispatcher:
    """The dispatcher; its streams and picks go on where the last state left them, open tasks come first."""
    state, block = parts.state, config.orchestrator
    sources = [environment.source for environment in parts.train.values()]
    dispatcher = Dispatcher(
        parts.train,
        parts.evals,
        picker=TrainPicker(sources, config.facts.seed, state.num_picked if state else 0),
        admission=Admission(
            block.max_inflight,
            episodes_per_minute=block.tasks_per_minute,
            max_burst=block.max_burst,
        ),
        limits=Limits(
            retries=block.retries,
            group_deadline_s=block.group_deadline_s,
            max_events=block.max_inflight,
        ),
        policy=policy,
        engines=parts.engines,
        holdings=parts.holdings,
        outcomes=outcomes,
        window=window,
        gate=gate,
        make_id=parts.make_id,
        on_open=on_open,
        salt_caches=True,
    )
    if state is not None:
        dispatcher.opener.cursors.streams.update(state.streams)
        dispatcher.opener.requeue((each.source, each.task) for each in state.open_tasks)
    return dispatcher


def make_schedule(config: OrchestratorProcessConfig, parts: Parts) -> EvalSchedule:
    """When to measure what."""
    settings = config.orchestrator.eval
    return EvalSchedule(
        [environment.source for environment in parts.evals.values()],
        last_version=config.facts.max_steps,
        skip_first=settings.skip_first_step,
        measured=parts.measured,
        retrigger=settings.retrigger_on_resume and parts.state is not None,
    )
