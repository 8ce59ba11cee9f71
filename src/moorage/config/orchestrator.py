"""Dispatch, scoring, packing and shipping."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from moorage.config.base import Config
from moorage.config.env import EvalSourceConfig, SamplingConfig, TrainSourceConfig


class EvalConfig(Config):
    """Measuring while training."""

    sources: list[EvalSourceConfig] = Field(default_factory=list)
    """The environments to measure on (`[[orchestrator.eval.sources]]`)."""

    interval: int = Field(default=100, ge=1)
    """Measure every so many steps."""

    group_size: int = Field(default=1, ge=1)
    """Episodes per task (k of avg@k)."""

    sampling: SamplingConfig = SamplingConfig()
    """How the policy is sampled for measuring."""

    skip_first_step: bool = False
    """Do not measure the starting model."""

    retrigger_on_resume: bool = False
    """Measure again at the step a run resumes from."""


class DropConfig(Config):
    """Which measured faults keep a trace out of training. All detectors always measure."""

    gibberish: bool = False
    """Drop traces with improbable rare tokens."""

    repetition: bool = False
    """Drop traces that repeat with near certainty."""

    zero_advantage: bool = True
    """Prune samples whose every trained token has advantage exactly 0."""


class OrchestratorConfig(Config):
    """The small process in the middle."""

    train: list[TrainSourceConfig] = Field(default_factory=list)
    """The environments to train on (`[[orchestrator.train]]`)."""

    eval: EvalConfig = EvalConfig()
    """Measuring while training."""

    sampling: SamplingConfig = SamplingConfig()
    """How the policy is sampled for training."""

    batch_size: int | None = Field(default=None, ge=1)
    """Traces per step. Give this or token_batch_size; neither gives 128."""

    token_batch_size: int | None = Field(default=None, ge=1)
    """Tokens per step, instead of batch_size."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per task; they are compared with each other."""

    algorithm: dict[str, Any] = Field(default_factory=lambda: {"type": "grpo"})
    """How episodes become credit: `{type = "grpo"}`, or a class by import path with its options."""

    max_inflight: int = Field(default=256, ge=1)
    """Episodes running at a time, train and eval together."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Samples whose oldest token is more versions behind what is being trained are dropped."""

    max_ahead: int = Field(default=1, ge=0)
    """Steps that the orchestrator may be ahead of the newest policy version. 0 is synchronous."""

    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Limit on episode starts. None: none."""

    max_burst: int | None = Field(default=None, ge=1)
    """Episode starts within 5 s that no ending made room for (at the beginning, or after a pause). Spares
    sandboxes and judges a stampede. None: no limit."""

    retries: int = Field(default=1, ge=0)
    """How often an episode lost to an infrastructure failure is dispatched again."""

    group_deadline_s: float = Field(default=1800.0, gt=0)
    """A train group that is not complete after this time is scored with what has arrived. Eval groups have no
    such limit, so that every measurement is whole; their episodes end at the `deadline_s` of their source."""

    max_waiting: int | None = Field(default=None, ge=1)
    """Scored traces that may wait for a batch before dispatch pauses. None: four batches."""

    drop: DropConfig = DropConfig()
    """Which measured faults keep a trace out of training."""

    @model_validator(mode="after")
    def _check(self) -> OrchestratorConfig:
        if self.batch_size is not None and self.token_batch_size is not None:
            raise ValueError("give batch_size or token_batch_size, not both")
        names = [source.name for source in self.train]
        if len(set(names)) != len(names):
            raise ValueError(f"two train sources share a name ({names}); set `name`")
        names = [source.name for source in self.eval.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"two eval sources share a name ({names}); set `name`")
        largest = max([self.group_size, *(source.group_size or 0 for source in self.train)])
        if self.max_inflight < largest:
            raise ValueError(f"max_inflight {self.max_inflight} is below the group size {largest}")
        return self

    @property
    def traces_per_batch(self) -> int | None:
        """Batch size in traces, or None in token mode."""
        if self.token_batch_size is not None:
            return None
        return self.batch_size or 128
