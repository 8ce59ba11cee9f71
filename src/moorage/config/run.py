"""The one file a person writes, and the config of each process.

No field is written twice: `moorage.config.derive` fills the process configs. They are written to
`configs/*.json` and hold no secret.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moorage.config.base import Config
from moorage.config.engine import InferenceConfig
from moorage.config.env import EnvServerConfig
from moorage.config.model import ModelConfig
from moorage.config.orchestrator import OrchestratorConfig
from moorage.config.trainer import TrainerConfig


class PayloadConfig(Config):
    """Where per-token arrays lie, and for how long."""

    retain: Literal["fetched", "checkpoint"] = "fetched"
    """`fetched`: a payload is deleted once every rank has it. `checkpoint`: it stays on disk in the run
    folder until a whole checkpoint covers its step, so that a resumed trainer trains on the same batches."""

    spool_dir: str | None = None
    """Where blobs are kept. None: tmpfs when it has room, else the temporary folder."""

    spool_budget_mib: int = Field(default=4096, ge=1)
    """Bytes that one env server's spool may hold; a keep waits when it is full, then the episode fails."""


class CheckpointConfig(Config):
    """Saving the run's state."""

    interval: int | None = Field(default=None, ge=1)
    """Save every so many steps, and at the end. None: never."""

    keep_last: int | None = Field(default=None, ge=1)
    """Keep the newest so many whole checkpoints."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` makes a checkpoint: at the interval and at the end. Each process asks for itself."""
        return self.interval is not None and (step % self.interval == 0 or step == last_step)


class WandbConfig(Config):
    """Weights & Biases."""

    project: str
    """Project to log to."""

    name: str | None = None
    """None: the run's name."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes to disk only."""

    sample_interval: int = Field(default=10, ge=1)
    """Steps between sample tables."""

    num_samples: int = Field(default=8, ge=0)
    """Rows of a sample table."""


class MonitorConfig(Config):
    """Where metrics go, besides the JSONL files that are always written."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None: off."""


class RunConfig(Config):
    """`moorage rl @ run.toml`."""

    name: str = "run"
    """Name of the run; its folder is `<output_dir>/<name>`."""

    output_dir: str = "runs"
    """Folder of all runs."""

    seed: int = 0
    """Seeds the order of tasks, the built-in sampler and the trainer."""

    max_steps: int = Field(..., ge=1)
    """Optimizer steps of the whole run."""

    seq_len: int = Field(default=2048, ge=8)
    """Longest training sequence; longer samples are cut."""

    model: ModelConfig
    """The model being trained."""

    inference: InferenceConfig = InferenceConfig()
    """The inference engine."""

    orchestrator: OrchestratorConfig
    """Dispatch, scoring, packing and shipping."""

    trainer: TrainerConfig = TrainerConfig()
    """The training step."""

    payload: PayloadConfig = PayloadConfig()
    """Where per-token arrays lie."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving the run's state."""

    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go."""

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if not self.orchestrator.train:
            raise ValueError("orchestrator.train is empty; add an [[orchestrator.train]] block")
        if self.trainer.num_ranks % self.trainer.replicate:
            replicate, ranks = self.trainer.replicate, self.trainer.num_ranks
            raise ValueError(f"trainer.replicate {replicate} does not divide trainer.num_ranks {ranks}")
        if self.checkpoint.interval is None:
            self._check_without_checkpoints()
        return self

    def _check_without_checkpoints(self) -> None:
        if self.payload.retain == "checkpoint":
            raise ValueError(
                "payload.retain = 'checkpoint' keeps payloads until a checkpoint covers them, and there is "
                "none; set checkpoint.interval"
            )
        for name in ("keep_last", "keep_interval"):
            if getattr(self.checkpoint, name) is not None:
                raise ValueError(f"checkpoint.{name} has no effect without checkpoint.interval; set that too")


class ProcessFacts(Config):
    """What every process of a run knows about it."""

    run_dir: str
    """Run folder."""

    run_id: str
    """Identity of the run, the same over all its attempts."""

    attempt: int = Field(default=1, ge=1)
    """Counts starts and resumes, from 1."""

    start_step: int = Field(default=1, ge=1)
    """First step of this attempt: 1, or one after the checkpoint that it resumes from."""

    max_steps: int = Field(..., ge=1)
    """Last step of the run."""

    seq_len: int = Field(default=2048, ge=8)
    """Longest training sequence."""

    seed: int = 0
    """The run's seed."""


class InferenceProcessConfig(Config):
    """`moorage inference @ inference.json`: one replica."""

    inference: InferenceConfig
    """The engine; `port`, `routed_experts`, `sampling_mask`, `head_k`, `max_model_len`, `dtype` and `seed`
    are resolved."""

    model: ModelConfig
    """What it serves."""

    run_dir: str | None = None
    """Run folder (log, heartbeat); None when it stands alone."""

    name: str = "inference"
    """Process name: `inference`, or `inference.1` and so on."""


class OrchestratorProcessConfig(Config):
    """`moorage orchestrator @ orchestrator.json`."""

    facts: ProcessFacts
    orchestrator: OrchestratorConfig
    model: ModelConfig
    checkpoint: CheckpointConfig
    payload: PayloadConfig
    monitor: MonitorConfig
    engine_urls: list[str]
    """Every replica."""

    foreign_engines: bool = False
    """Somebody else runs the engines: what they hold when the run starts is not known."""

    num_data_ranks: int = Field(default=1, ge=1)
    """Ranks that each get a batch file."""

    keep_cache: bool = False
    """As `inference.keep_cache`."""

    env_replicas: int = Field(default=1, ge=1)
    """Replicas of each launcher-managed env server."""

    require_routing: bool = False
    """The trainer replays routing: samples without rows are an error."""

    ready_timeout_s: float = Field(default=600.0, gt=0)
    """As `inference.ready_timeout_s`."""


class TrainerProcessConfig(Config):
    """`moorage trainer @ trainer.json`, one rank under torchrun."""

    facts: ProcessFacts
    trainer: TrainerConfig
    model: ModelConfig
    checkpoint: CheckpointConfig
    payload: PayloadConfig
    monitor: MonitorConfig


class DerivedConfigs(Config):
    """All process configs of one attempt."""

    inference: list[InferenceProcessConfig]
    env_servers: list[EnvServerConfig]
    orchestrator: OrchestratorProcessConfig
    trainer: TrainerProcessConfig
