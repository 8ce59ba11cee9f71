"""The command line that starts a vLLM server. Pure.

Owns the mapping from `InferenceConfig` to vLLM's flags and environment. Promises:

- masks, heads and routing cost nothing unless asked for: their flags appear only then;
- log-probabilities are always those of the distribution that was sampled from (`processed_logprobs`);
- the scale-out generate route and the control routes are on; nothing is sent to anybody outside.

Does not start anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from moorage.config.engine import InferenceConfig
from moorage.config.limits import engine_conflicts, join_conflicts
from moorage.config.model import ModelConfig
from moorage.core.errors import ConfigError

DEFAULT_MAX_LOGPROBS = 20
"""vLLM's own limit; larger heads raise it."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, reload and label routes
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB of cache; vLLM on a CPU takes half of the machine's memory unless told."""


@dataclass(frozen=True)
class LaunchLine:
    """`argv` to run; `env` to set for it; `defaults` to set where the environment says nothing."""

    argv: tuple[str, ...]
    env: dict[str, str]
    defaults: dict[str, str]


def make_launch_line(
    engine: InferenceConfig, model: ModelConfig, *, port: int, is_moe: bool, on_cpu: bool = False
) -> LaunchLine:
    """How to start vLLM for `engine` (resolved) and `model` on `port`.

    `is_moe`: the model has experts. `on_cpu`: the installed vLLM is a CPU build. Raises ConfigError for
    settings that vLLM would refuse or ignore.
    """
    conflicts = engine_conflicts(engine, is_moe=is_moe)
    if conflicts:
        raise ConfigError(join_conflicts(conflicts))
    program = [engine.python, "-m", "vllm.entrypoints.cli.main"] if engine.python else ["vllm"]
    argv = [
        *program,
        "serve",
        model.path,
        *("--host", engine.host),
        *("--port", str(port)),
        *("--served-model-name", model.name),
        "--enable-scale-out",
        *("--api-server-count", "1"),
        *_shape(engine, is_moe),
        *_returns(engine),
        *("--generation-config", "vllm"),
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *(("--enforce-eager",) if on_cpu else ()),
        *engine.extra_args,
    ]
    return LaunchLine(tuple(argv), dict(ENVIRONMENT), dict(CPU_DEFAULTS) if on_cpu else {})


def _shape(engine: InferenceConfig, is_moe: bool) -> list[str]:
    """Devices, dtype and limits."""
    flags = ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    if engine.data_parallel_size > 1:
        flags += ["--data-parallel-size", str(engine.data_parallel_size)]
        flags += ["--enable-expert-parallel"] if is_moe else []
    flags += ["--dtype", engine.dtype, "--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_model_len is not None:
        flags += ["--max-model-len", str(engine.max_model_len)]
    if engine.seed is not None:
        flags += ["--seed", str(engine.seed)]
    flags += ["--enable-prefix-caching" if engine.enable_prefix_caching else "--no-enable-prefix-caching"]
    if engine.dtype != "float32":  # the trainer computes log-probabilities in float32; so must the head here
        flags += ["--hf-overrides", json.dumps({"head_dtype": "float32"}, separators=(",", ":"))]
    return flags


def _returns(engine: InferenceConfig) -> list[str]:
    """What comes back beside the tokens."""
    flags = ["--logprobs-mode", "processed_logprobs"]
    asked = (engine.head_k or 0) + 1  # as `generate.make_body` asks
    if asked > DEFAULT_MAX_LOGPROBS:
        flags += ["--max-logprobs", str(asked)]
    if engine.routed_experts:
        flags += ["--enable-return-routed-experts"]
    if engine.sampling_mask:
        flags += ["--return-sampling-mask"]
    return flags
