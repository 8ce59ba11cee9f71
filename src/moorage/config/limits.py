"""Which settings exclude each other, each with the reason and the remedy. Pure.

Owns what engines refuse or would silently do otherwise, so that a run is refused before anything starts:

- `engine_conflicts`: within one engine's settings; asked again when an engine is started by hand;
- `run_conflicts`: between sampling, trainer and engine.

Does not know processes. An empty list means that nothing is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moorage.config.distribution import agent_refusals, body_refusals
from moorage.config.engine import MAX_HEAD_K, InferenceConfig
from moorage.config.inherit import sampling_of, sources_by_split

if TYPE_CHECKING:
    from moorage.config.run import RunConfig

OWNED_FLAGS = {
    "--host": "inference.host",
    "--port": "inference.port",
    "--served-model-name": "model.name",
    "--dtype": "inference.dtype",
    "--max-model-len": "inference.max_model_len",
    "--max-num-seqs": "inference.max_num_seqs",
    "--max-logprobs": "inference.head_k",
    "--seed": "inference.seed",
    "--tensor-parallel-size": "inference.tensor_parallel_size",
    "-tp": "inference.tensor_parallel_size",
    "--data-parallel-size": "inference.data_parallel_size",
    "-dp": "inference.data_parallel_size",
    "--enable-return-routed-experts": "inference.routed_experts",
    "--return-sampling-mask": "inference.sampling_mask",
    "--enable-prefix-caching": "inference.enable_prefix_caching",
    "--no-enable-prefix-caching": "inference.enable_prefix_caching",
}
"""vLLM flags that a setting of moorage already gives."""

FIXED_FLAGS = frozenset(
    {"--logprobs-mode", "--enable-scale-out", "--tokens-only", "--api-server-count", "--generation-config"}
)
"""vLLM flags that training depends on; there is no choice."""

ROUTING_EXCLUDES = frozenset(
    {
        "--pipeline-parallel-size",
        "-pp",
        "--decode-context-parallel-size",
        "--prefill-context-parallel-size",
        "--kv-transfer-config",
    }
)
MASKS_EXCLUDE = frozenset({"--logits-processors", "--enable-batch-sharded-sampling"})


def engine_conflicts(engine: InferenceConfig, *, is_moe: bool) -> list[str]:
    """What is wrong with one engine's (resolved) settings. `is_moe`: the model has experts."""
    found = []
    if engine.routed_experts and not is_moe:
        found.append("inference.routed_experts is on, but the model has no experts; leave it out")
    found += dtype_conflicts(engine.dtype)
    if engine.backend == "builtin":
        return found + _builtin_conflicts(engine)
    if engine.device not in ("auto", "cpu", "cuda"):
        found.append(f"inference.device {engine.device!r} has no effect on vLLM; set CUDA_VISIBLE_DEVICES")
    if engine.num_threads != 1:
        found.append("inference.num_threads has no effect on vLLM; set VLLM_CPU_OMP_THREADS_BIND")
    if engine.device == "cpu" and (engine.routed_experts or engine.sampling_mask):
        found.append(
            "vLLM on a CPU returns neither routed experts nor sampling masks (they need its GPU model "
            "runner); use inference.backend = 'builtin', or switch trainer.router_replay and truncated "
            "sampling off"
        )
    if engine.routed_experts and not engine.enable_prefix_caching:
        found.append("vLLM returns routed experts only with inference.enable_prefix_caching on")
    return found + _argument_conflicts(engine)


def dtype_conflicts(dtype: str) -> list[str]:
    """What is wrong with an engine's dtype, once `auto` has become `model.dtype`."""
    if dtype in ("auto", "float32", "bfloat16", "float16"):
        return []
    return [
        f"no engine computes in {dtype}, which inference.dtype takes from model.dtype; set "
        "inference.dtype = 'float32'"
    ]


def _builtin_conflicts(engine: InferenceConfig) -> list[str]:
    given = {
        "tensor_parallel_size": engine.tensor_parallel_size > 1,
        "data_parallel_size": engine.data_parallel_size > 1,
        "extra_args": bool(engine.extra_args),
        "python": engine.python is not None,
    }
    return [
        f"inference.{name} has no effect on the built-in engine; leave it out or set backend = 'vllm'"
        for name, is_set in given.items()
        if is_set
    ]


def _argument_conflicts(engine: InferenceConfig) -> list[str]:
    flags = {arg.split("=", 1)[0].replace("_", "-") for arg in engine.extra_args if arg.startswith("-")}
    found = [
        f"inference.extra_args: {f} is set by {OWNED_FLAGS[f]}" for f in sorted(flags & OWNED_FLAGS.keys())
    ]
    found += [f"inference.extra_args: {f} is fixed by moorage" for f in sorted(flags & FIXED_FLAGS)]
    if engine.routed_experts:
        found += [
            f"vLLM refuses {f} together with routed experts; take it out of inference.extra_args or set "
            "trainer.router_replay = false"
            for f in sorted(flags & ROUTING_EXCLUDES)
        ]
    if engine.sampling_mask:
        found += [
            f"vLLM refuses {f} together with sampling masks; take it out of inference.extra_args"
            for f in sorted(flags & MASKS_EXCLUDE)
        ]
    return found


def run_conflicts(run: RunConfig, engine: InferenceConfig, *, replay: bool, is_moe: bool) -> list[str]:
    """What is wrong between a run's (filled) sources, its trainer and its (resolved) engine."""
    found = engine_conflicts(engine, is_moe=is_moe)
    if replay and not is_moe:
        found.append("trainer.router_replay is on, but the model has no experts; leave it out")
    elif replay and not engine.routed_experts:
        found.append("trainer.router_replay needs inference.routed_experts, which is off; leave it out")
    wanted = loss_head_k(run)
    if not 0 <= wanted <= MAX_HEAD_K:
        found.append(f"trainer.loss.head_k is {wanted}, which is not within 0 and {MAX_HEAD_K}")
    elif wanted > (engine.head_k or 0):
        found.append(
            f"trainer.loss.head_k is {wanted}, but inference.head_k only {engine.head_k}; leave it out"
        )
    return found + _train_conflicts(run, engine) + _vllm_conflicts(run, engine)


def loss_head_k(run: RunConfig) -> int:
    """Size of the top-k head that the loss asks for, 0 for none. Raises ValueError when it is no number."""
    head_k = run.trainer.loss.get("head_k", 0)
    if isinstance(head_k, bool) or not isinstance(head_k, int):
        raise ValueError(f"trainer.loss.head_k is {head_k!r}; it is a number of tokens")
    return head_k


def _train_conflicts(run: RunConfig, engine: InferenceConfig) -> list[str]:
    found = []
    for source in run.orchestrator.train:
        sampling = sampling_of(source)
        reasons = body_refusals(sampling.extra_body) + agent_refusals(source.env, run.model.name)
        if sampling.temperature == 0:
            reasons.append(
                "sampling.temperature is 0: a greedy token has no probability to train with; set it above 0 "
                "(1 samples from the model as it is)"
            )
        if sampling.truncated and not engine.sampling_mask:
            reasons.append(
                "sampling is truncated, but inference.sampling_mask is off: log-probabilities of the engine "
                "and the trainer could not be compared; leave inference.sampling_mask out"
            )
        found += [f"train source {source.name!r}: {reason}" for reason in reasons]
    return found


def _vllm_conflicts(run: RunConfig, engine: InferenceConfig) -> list[str]:
    if engine.backend != "vllm" or not engine.sampling_mask:
        return []
    return [
        f"sampling of {split} source {source.name!r}: with sampling masks vLLM refuses every request without "
        f"top_k > 0 and temperature > 0 (top_k is {sampling.top_k}, temperature {sampling.temperature:g})"
        for split, source in sources_by_split(run.orchestrator)
        for sampling in [sampling_of(source)]
        if sampling.top_k == 0 or sampling.temperature == 0
    ]


def join_conflicts(conflicts: Iterable[str]) -> str:
    """All reasons as one message."""
    return "; ".join(conflicts)
