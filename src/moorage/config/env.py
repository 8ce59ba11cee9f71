"""Environments: which, how many workers, where, and how they are sampled.

The `env` block is a plain table here: it is verifiers' own configuration and is resolved in `moorage.env`
(importing verifiers costs seconds). moorage takes `taskset.shuffle` out of it before verifiers sees it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moorage.config.base import Config

Split = Literal["train", "eval"]
MIN_TEMPERATURE = 0.01


class SamplingConfig(Config):
    """How the policy is sampled. Unset fields fall back to the enclosing block's."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits; the trainer divides by the same number. 0 takes the likeliest token, for eval."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus truncation. Below 1 the kept set is recorded and needs top_k > 0."""

    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest token's probability."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion of one model call. None: as much as fits."""

    seed: int | None = None
    """Seed of every request; None draws fresh randomness. For debugging only."""

    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields for the engine's sampling parameters, as they are. Train sources: only what leaves the
    distribution alone (`stop`, `ignore_eos` and the like)."""

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"engines raise this to {MIN_TEMPERATURE}; set 0, or {MIN_TEMPERATURE} or more")
        return value

    @property
    def truncated(self) -> bool:
        """Whether sampling draws from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class SourceConfig(Config):
    """One environment and the server that runs it."""

    name: str | None = None
    """Name in metrics, logs and addresses, unique per split. None: the last part of the taskset's id."""

    env: dict[str, Any]
    """The environment, as verifiers takes it: `taskset = {id = ...}`, agents, timeouts, retries. An agent
    without a runtime runs on this machine when its harness executes no code, and is refused otherwise."""

    address: str | None = None
    """RPC address (`tcp://host:port`) of an env server that somebody else runs. None: the launcher starts
    one."""

    host: str = "127.0.0.1"
    """Bind host of the env server and its payload service."""

    num_workers: int = Field(default=1, ge=1)
    """Worker processes of the env server."""

    max_concurrent: int = Field(default=256, ge=1)
    """Episodes that one worker runs at a time; more wait in the broker."""

    deadline_s: float = Field(default=600.0, gt=0)
    """An episode that takes longer is ended, from outside its process if need be."""

    group_size: int | None = Field(default=None, ge=1)
    """Episodes per task. None: the enclosing block's."""

    sampling: SamplingConfig | None = None
    """Sampling for this source. None: the enclosing block's."""

    @model_validator(mode="after")
    def _name_from_taskset(self) -> SourceConfig:
        if self.name is None:
            taskset = self.env.get("taskset")
            identity = (taskset.get("id") if isinstance(taskset, dict) else None) or self.env.get("id")
            if not identity:
                raise ValueError(
                    "an env block needs `taskset.id` (or `id`), for example "
                    'env = { taskset = { id = "moorage.tasksets.reverse_text" } }'
                )
            object.__setattr__(self, "name", str(identity).rsplit("/", 1)[-1].rsplit(".", 1)[-1])
        if not self.name or self.name in {"agg", "all"} or "/" in self.name:
            raise ValueError(f"name {self.name!r} is reserved or holds a slash; choose another")
        return self


class TrainSourceConfig(SourceConfig):
    """An environment to train on."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of tasks drawn from this source, relative to the others'."""

    algorithm: dict[str, Any] | None = None
    """Algorithm for this source (`{type = "grpo"}`). None: the enclosing block's."""


class EvalSourceConfig(SourceConfig):
    """An environment to measure on."""

    num_tasks: int | None = Field(default=None, ge=1)
    """Measure the first so many tasks. None: all (an infinite taskset needs a number)."""

    interval: int | None = Field(default=None, ge=1)
    """Measure every so many steps. None: the enclosing block's."""


class EnvServerConfig(Config):
    """`moorage env-server @ env.toml`: one env server. The launcher derives it from a source."""

    source: SourceConfig
    """The environment and the limits of its server."""

    split: Split = "train"
    """Decides the default of shuffle, the names of streams and files, and whether agents may sample otherwise
    than their source."""

    model_path: str
    """Folder of the tokenizer."""

    renderer: str = "auto"
    """As `model.renderer`."""

    run_dir: str
    """Run folder: address file, log and heartbeat go here."""

    run_id: str = ""
    """Run that starts this server; empty when it stands alone and serves whoever says hello first."""

    attempt: int = Field(default=1, ge=1)
    """Attempt of that run."""

    rpc_port: int = Field(default=0, ge=0, le=65535)
    """Port of the RPC socket; 0 chooses a free one and publishes it."""

    payload_port: int = Field(default=0, ge=0, le=65535)
    """Port of the payload service; 0 chooses a free one."""

    spool_dir: str | None = None
    """Where blobs are kept. None: tmpfs when it has room, else the temporary folder."""

    spool_budget_mib: int = Field(default=4096, ge=1)
    """Bytes the spool may hold; a keep waits when it is full, then the episode fails."""

    retain: Literal["fetched", "checkpoint"] = "fetched"
    """As `payload.retain`."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """As `inference.request_timeout_s`."""

    head_k: int = Field(default=0, ge=0)
    """Ask the engine for this many top log-probabilities per sampled token; 0 for none."""

    detectors: dict[str, Any] = Field(default_factory=dict)
    """Thresholds of the degeneracy detectors."""
