"""Warming a model up on conversations before reinforcement learning (`moorage sft @ sft.toml`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from moorage.config.base import Config
from moorage.config.trainer import OptimizerConfig, ScheduleConfig


class InitConfig(Config):
    """Make the model to start from, with a character tokenizer and random weights. No download."""

    architecture: str = "qwen3"
    """`qwen3` (dense) or `qwen3_moe` (8 experts, 2 per token)."""

    overrides: dict[str, Any] = Field(default={})
    """Fields of the model's config to replace, for example `{ num_hidden_layers = 4 }`."""


class SftConfig(Config):
    """`moorage sft @ sft.toml`: supervised steps on a taskset's conversations."""

    model: str | None = None
    """Folder of the model to start from. Give this or `[init]`."""

    init: InitConfig | None = None
    """Make a starter model instead of loading one."""

    output: str
    """Folder to save the trained model to, in Hugging Face layout. It must not hold a model yet."""

    taskset: dict[str, Any]
    """The taskset whose conversations are learned: `{ id = "moorage.tasksets.reverse_text" }` and options.
    Its  class defines `conversations(seed)`."""

    max_steps: int = Field(default=300, ge=1)
    """Optimizer steps."""

    batch_size: int = Field(default=64, ge=1)
    """Conversations per step, over all ranks."""

    seq_len: int = Field(default=512, ge=8)
    """Longest sequence; longer ones are cut."""

    row_tokens: int = Field(default=8192, ge=8)
    """Tokens of one forward pass: conversations are packed into rows of at most this length."""

    seed: int = 0
    """Seeds the initial weights and the conversations."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the weights."""

    device: str = "auto"
    """`cpu`, `cuda`, or auto."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes; start several with torchrun."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, betas=(0.9, 0.98))
    """AdamW."""

    schedule: ScheduleConfig = ScheduleConfig(type="linear", warmup_steps=20, final_ratio=0.1)
    """Learning rate over steps."""

    log_interval: int = Field(default=20, ge=1)
    """Steps between lines of progress."""

    @model_validator(mode="after")
    def _one_start(self) -> SftConfig:
        if (self.model is None) == (self.init is None):
            raise ValueError("give either `model` (a folder) or an [init] block, not both and not neither")
        if not self.taskset.get("id"):
            raise ValueError('taskset needs an id, for example { id = "moorage.tasksets.reverse_text" }')
        if self.row_tokens < self.seq_len:
            raise ValueError(f"row_tokens {self.row_tokens} is below seq_len {self.seq_len}")
        return self
