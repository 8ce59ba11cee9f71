"""The inference engine: the built-in one, or vLLM as a server that is started by command line."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moorage.config.base import Config

MAX_HEAD_K = 1024


class InferenceConfig(Config):
    """One inference server (`replicas` of them), started by the launcher or found at `urls`."""

    backend: Literal["builtin", "vllm"] = "builtin"
    """`builtin` runs on CPU or one device and needs nothing else; `vllm` starts a vLLM server."""

    urls: list[str] = Field(default_factory=list)
    """Addresses of engines that somebody else runs. Empty: the launcher starts `replicas` engines."""

    host: str = "127.0.0.1"
    """Bind host. vLLM's control routes cannot be protected: anything but loopback prints a warning."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first replica; replica i takes port + i. 0: free ports are chosen."""

    replicas: int = Field(default=1, ge=1)
    """How many engines serve the same policy."""

    device: str = "auto"
    """Built-in engine: torch device (`cpu`, `cuda:0`). auto: a CUDA device when there is one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the engine's weights. auto: the trainer's dtype."""

    max_model_len: int | None = Field(default=None, ge=8)
    """Longest sequence (prompt and completion). None: the run's seq_len."""

    max_num_seqs: int = Field(default=128, ge=1)
    """Requests decoded together; more wait."""

    enable_prefix_caching: bool = True
    """Reuse the cache of a prompt's prefix, within one policy version."""

    keep_cache: bool = False
    """Keep running requests' cache over a weight update: their later tokens then attend to keys of older
    weights, and their recorded span of versions says so. New runs share no cache with older ones."""

    routed_experts: bool | None = None
    """Return the experts chosen per token. None: on when the trainer replays routing."""

    sampling_mask: bool | None = None
    """Return the kept set of truncated sampling. None: on when sampling is truncated."""

    head_k: int | None = Field(default=None, ge=1, le=MAX_HEAD_K)
    """Return the top-k head of every sampled token. None: what the loss asks for."""

    num_threads: int = Field(default=1, ge=1)
    """Built-in engine on CPU: threads. One is fastest for small models beside other processes."""

    seed: int | None = None
    """Seed of the built-in sampler. None: the run's seed."""

    python: str | None = None
    """vLLM: the Python of the environment it is installed in. None: `vllm` on the PATH."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """vLLM: devices per replica."""

    data_parallel_size: int = Field(default=1, ge=1)
    """vLLM: data-parallel ranks behind one replica."""

    extra_args: list[str] = Field(default_factory=list)
    """vLLM: further command-line arguments, appended as they are."""

    ready_timeout_s: float = Field(default=600.0, gt=0)
    """How long an engine may take to answer `/health`, counted from when the env servers are reached. A vLLM
    that the launcher starts is given up after the same time."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time for one model call when the rollout's deadline allows more."""

    @model_validator(mode="after")
    def _check(self) -> InferenceConfig:
        if self.port and self.port + self.replicas - 1 > 65535:
            raise ValueError(f"port {self.port} leaves no room for {self.replicas} replicas")
        return self
