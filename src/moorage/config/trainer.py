"""The training step: model layout, optimizer, loss, checkpoints' trainer part."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from moorage.config.base import Config


class OptimizerConfig(Config):
    """AdamW."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate after warm-up. 0 trains nothing and is a useful control."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class ScheduleConfig(Config):
    """Learning rate over steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""

    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step, as a share of `lr` (linear and cosine)."""


class TrainerConfig(Config):
    """One or many ranks of the same training step."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes (one per device) started by the launcher through torchrun."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model (hybrid sharding); divides num_ranks."""

    fsdp: bool | None = None
    """Shard with FSDP2. None: when there is more than one rank."""

    device: str = "auto"
    """`cpu`, `cuda`, or auto."""

    param_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Dtype of computation under FSDP mixed precision. None: model.dtype."""

    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Dtype of gradient reduction. None: float32, or model.dtype when that is wider."""

    attention: str = "packed_sdpa"
    """Attention for packed rows: `packed_sdpa` (exact, any device) or a transformers implementation that
    passes the packing self-check at start."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    compile: bool = False
    """`torch.compile` of each block; on a CPU it needs a C++ compiler (`CXX`, or g++). Packed attention and
    replayed routers stay as they are. Compiling takes up to minutes within the first steps."""

    router_replay: bool | None = None
    """Mixture of experts: train with the engine's expert choices. None: on for MoE models."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    loss: dict[str, Any] = Field(default_factory=lambda: {"type": "ipo"})
    """Policy loss by name with its options, or a class by import path."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""

    fetch_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for fetching one step's payloads."""

    fetch_connections: int = Field(default=8, ge=1)
    """Parallel payload fetches per rank."""

    prefetch_budget_mib: int = Field(default=1024, ge=0)
    """Bytes that may be fetched ahead while a step trains; 0 fetches nothing ahead."""

    seed: int | None = None
    """None: the run's seed."""
