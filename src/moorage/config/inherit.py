"""What sources inherit from the block around them, filled in. Pure.

Promises: filling in twice changes nothing, so a config that went through JSON, where every field counts as
set, means what it meant before. Derived configs hold filled sources only.
"""

from __future__ import annotations

from typing import Any, TypeVar

from moorage.config.env import SamplingConfig, SourceConfig, Split
from moorage.config.orchestrator import EvalConfig, OrchestratorConfig

SourceT = TypeVar("SourceT", bound=SourceConfig)


def fill_sources(config: OrchestratorConfig) -> OrchestratorConfig:
    """`config` with group size, sampling, and algorithm or interval written into each of its sources."""
    train = [_filled(each, config, algorithm=_own(each.algorithm, config.algorithm)) for each in config.train]
    block = config.eval
    evals = [_filled(each, block, interval=_own(each.interval, block.interval)) for each in block.sources]
    return config.model_copy(
        update={"train": train, "eval": block.model_copy(update={"sources": evals})},
    )


def sources_by_split(run: OrchestratorConfig) -> list[tuple[Split, SourceConfig]]:
    """(split, source) of every environment, train first."""
    train: list[tuple[Split, SourceConfig]] = [("train", source) for source in run.train]
    return [*train, *(("eval", source) for source in run.eval.sources)]


def sampling_of(source: SourceConfig) -> SamplingConfig:
    """How a filled source is sampled."""
    assert source.sampling is not None, f"source {source.name!r} is not filled in"
    return source.sampling


def merge_sampling(shared: SamplingConfig, own: SamplingConfig | None) -> SamplingConfig:
    """The shared block with what a source sets explicitly on top. All fields of the result count as set."""
    over = {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}
    return SamplingConfig(**{**dict(shared), **over})


def _filled(source: SourceT, block: OrchestratorConfig | EvalConfig, **more: Any) -> SourceT:
    inherited = {
        "group_size": _own(source.group_size, block.group_size),
        "sampling": merge_sampling(block.sampling, source.sampling),
    }
    return source.model_copy(update={**inherited, **more})


def _own(own: Any, shared: Any) -> Any:
    return shared if own is None else own
