"""How each process's config follows from the run file. Pure.

Promises: what a person wrote once is written nowhere else; settings that exclude each other are refused here,
before anything starts, all of them in one message.
"""

from __future__ import annotations

from typing import Any

from moorage.config.base import make_config
from moorage.config.engine import InferenceConfig
from moorage.config.env import EnvServerConfig
from moorage.config.inherit import fill_sources, sampling_of, sources_by_split
from moorage.config.limits import join_conflicts, loss_head_k, run_conflicts
from moorage.config.run import (
    DerivedConfigs,
    InferenceProcessConfig,
    OrchestratorProcessConfig,
    ProcessFacts,
    RunConfig,
    TrainerProcessConfig,
)


def derive(run: RunConfig, facts: ProcessFacts, *, engine_ports: list[int], is_moe: bool) -> DerivedConfigs:
    """The config of every process.

    `engine_ports`: one free port per replica. `is_moe`: whether the model's config.json describes a mixture
    of experts. Raises ValueError (shown as ConfigError) on settings that exclude each other, and ConfigError
    when a process would refuse its config: each is read here as the process reads it.
    """
    run = run.model_copy(update={"orchestrator": fill_sources(run.orchestrator)})
    replay = is_moe if run.trainer.router_replay is None else run.trainer.router_replay
    engine = _resolve_engine(run, replay)
    conflicts = run_conflicts(run, engine, replay=replay, is_moe=is_moe)
    if conflicts:
        raise ValueError(join_conflicts(conflicts))
    derived = _all_configs(run, facts, engine, engine_ports, replay=replay)
    return make_config(DerivedConfigs, derived.model_dump(mode="json", warnings=False), source="run file")


def _all_configs(
    run: RunConfig, facts: ProcessFacts, engine: InferenceConfig, engine_ports: list[int], *, replay: bool
) -> DerivedConfigs:
    urls = run.inference.urls or [f"http://{run.inference.host}:{port}" for port in engine_ports]
    return DerivedConfigs(
        inference=[] if run.inference.urls else _replicas(run, facts, engine, engine_ports),
        env_servers=_env_servers(run, facts, engine.head_k or 0),
        orchestrator=OrchestratorProcessConfig(
            facts=facts,
            orchestrator=run.orchestrator,
            engine_urls=urls,
            foreign_engines=bool(run.inference.urls),
            num_data_ranks=run.trainer.num_ranks,
            keep_cache=run.inference.keep_cache,
            require_routing=replay,
            ready_timeout_s=run.inference.ready_timeout_s,
            **_shared(run),
        ),
        trainer=TrainerProcessConfig(
            facts=facts,
            trainer=run.trainer.model_copy(
                update={"router_replay": replay, "seed": _first_given(run.trainer.seed, run.seed)}
            ),
            **_shared(run),
        ),
    )


def _resolve_engine(run: RunConfig, replay: bool) -> InferenceConfig:
    """The engine's settings as the run's needs decide them: arrays are returned only when they are used."""
    engine = run.inference
    truncated = any(sampling_of(source).truncated for source in run.orchestrator.train)
    head_k = _first_given(engine.head_k, loss_head_k(run))
    return engine.model_copy(
        update={
            "routed_experts": _first_given(engine.routed_experts, replay),
            "sampling_mask": _first_given(engine.sampling_mask, truncated),
            "head_k": head_k or None,
            "max_model_len": engine.max_model_len or run.seq_len,
            "dtype": run.model.dtype if engine.dtype == "auto" else engine.dtype,
            "seed": _first_given(engine.seed, run.seed),
            "replicas": 1,
        }
    )


def _replicas(
    run: RunConfig, facts: ProcessFacts, engine: InferenceConfig, ports: list[int]
) -> list[InferenceProcessConfig]:
    return [
        InferenceProcessConfig(
            inference=engine.model_copy(
                # Replicas that draw alike would give a group the same completion twice.
                update={"port": port, "seed": (engine.seed or 0) + index}
            ),
            model=run.model,
            run_dir=facts.run_dir,
            name="inference" if index == 0 else f"inference.{index}",
        )
        for index, port in enumerate(ports)
    ]


def _env_servers(run: RunConfig, facts: ProcessFacts, head_k: int) -> list[EnvServerConfig]:
    return [
        EnvServerConfig(
            source=source,
            split=split,
            model_path=run.model.path,
            renderer=run.model.renderer,
            run_dir=facts.run_dir,
            run_id=facts.run_id,
            attempt=facts.attempt,
            spool_dir=run.payload.spool_dir,
            spool_budget_mib=run.payload.spool_budget_mib,
            retain=run.payload.retain,
            request_timeout_s=run.inference.request_timeout_s,
            head_k=head_k if split == "train" else 0,
        )
        for split, source in sources_by_split(run.orchestrator)
        if source.address is None
    ]


def _shared(run: RunConfig) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("model", "checkpoint", "payload", "monitor")}


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
