"""An orchestrator with scripted partners and a real run folder."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from moorage.config.base import make_config
from moorage.config.run import OrchestratorProcessConfig
from moorage.core.rundir import RunDir
from moorage.monitor.fanout import Fanout
from moorage.monitor.files import FileMonitor, read_metrics
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.measuring import read_measured
from moorage.orchestrator.parts import Parts
from moorage.orchestrator.run import Orchestrator
from moorage.orchestrator.sources import resolve_eval, resolve_train
from tests.unit.orchestrator.scripted import (
    ScriptedEngines,
    ScriptedEnv,
    ScriptedStore,
    ScriptedTrainer,
    reply_after,
)


def make_process_config(root: Path, max_steps: int, **settings: Any) -> OrchestratorProcessConfig:
    facts = {"run_dir": str(root / "run"), "run_id": "r", "max_steps": max_steps, "seq_len": 64}
    facts["start_step"] = settings.pop("start_step", 1)
    checkpoint = {"interval": settings.pop("checkpoint_interval", None)}
    orchestrator = {
        "train": [{"name": "script", "env": {"taskset": {"id": "scripted"}}}],
        "batch_size": 16,
        "group_size": 4,
        "max_inflight": 32,
        **settings,
    }
    return make_config(
        OrchestratorProcessConfig,
        {
            "facts": facts,
            "orchestrator": orchestrator,
            "model": {"path": str(root / "model")},
            "checkpoint": checkpoint,
            "payload": {},
            "monitor": {},
            "engine_urls": ["http://engine"],
        },
    )


def make_orchestrator(
    config: OrchestratorProcessConfig,
    train: ScriptedEnv,
    evals: dict[str, ScriptedEnv] | None = None,
    engines: ScriptedEngines | None = None,
    state=None,
    scores_groups: bool = False,
) -> Orchestrator:
    run = RunDir(config.facts.run_dir)
    ids = itertools.count()
    evals = evals or {}
    train_sources = resolve_train(config.orchestrator)
    eval_sources = {source.name: source for source in resolve_eval(config.orchestrator)}
    parts = Parts(
        train={s.name: Environment(s, train, scores_groups) for s in train_sources},
        evals={name: Environment(eval_sources[name], env) for name, env in evals.items()},
        eval_sizes={name: source.num_tasks or 4 for name, source in eval_sources.items()},
        engines=engines or ScriptedEngines(),
        holdings=Holdings(train.store),
        monitor=Fanout([FileMonitor(run.metrics("orchestrator"))]),
        state=state,
        live_version=config.facts.start_step - 1,
        measured=read_measured(run, evals),
        make_id=lambda: f"g{next(ids)}",
    )
    return Orchestrator(config, parts)


async def run_with_trainer(
    orchestrator: Orchestrator,
    trainer: ScriptedTrainer,
    timeout_s: float = 60,
    stop: asyncio.Event | None = None,
) -> bool:
    training = asyncio.create_task(trainer.run())
    try:
        async with asyncio.timeout(timeout_s):
            done = await orchestrator.run(stop or asyncio.Event())
            if done:
                await training
            return done
    finally:
        training.cancel()
        orchestrator.parts.monitor.close()


def assert_accounts(orchestrator: Orchestrator) -> None:
    counts = orchestrator.outcomes.counts
    assert orchestrator.outcomes.in_flight == orchestrator.outcomes.waiting == 0
    assert counts.started == counts.trained + counts.errored + counts.cancelled + sum(counts.dropped.values())
    assert orchestrator.dispatcher.admission.total == 0


def test_three_steps_end_with_every_episode_and_payload_accounted_for(tmp_path):
    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store, lambda rng: rng.random() * 0.01))
        config = make_process_config(tmp_path, 3)
        orchestrator = make_orchestrator(config, env)
        trainer = ScriptedTrainer(orchestrator.run_dir, store, first=1, last=3)
        assert await run_with_trainer(orchestrator, trainer)
        return orchestrator, store, trainer

    orchestrator, store, trainer = asyncio.run(scenario())
    store.assert_clean()
    assert_accounts(orchestrator)
    rows = read_metrics(orchestrator.run_dir.metrics("orchestrator"))
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    for row in rows[:3]:  # a fast orchestrator may fill a whole batch from what waited: no arrival, no mean
        assert ("reward/mean" in row) == (row["progress/rollouts"] > 0)
        assert 0 <= row.get("reward/mean", 0) <= 1
    assert "reward/mean" in rows[0]
    assert len({trace for _, trace in trainer.trained}) == len(trainer.trained)
    assert store.ledger.freed["trainer"] == len(trainer.trained)
