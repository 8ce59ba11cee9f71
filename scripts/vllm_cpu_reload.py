"""A plugin for the CPU build of vLLM 0.32: `reload_weights` that leaves no old weights behind.

scripts/install_vllm_cpu.sh puts it into vLLM's environment; moorage itself never imports it. On a CPU vLLM
computes with packed copies of the weights. Its reload does not pack a tied output head again, and packs
experts wrongly, so that log-probabilities after an update belong to no model (measured: off by 0.7 and 0.06;
a plain start is exact to 4e-7). Here a reload builds the model again from the folder, as a start does, and
hands the caches over. On a GPU nothing is packed and vLLM's own reload serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes (entry point `vllm.general_plugins`)."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.reload_weights = reload_weights


def reload_weights(
    runner: Any,
    weights_iterator: Iterable[Any] | None = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> None:
    """Build the model again from `weights_path` (default: where it came from) and keep the caches."""
    from vllm.model_executor.model_loader import get_model

    if weights_iterator is not None or not is_checkpoint_format:
        raise NotImplementedError("on a CPU weights are reloaded from a folder in Hugging Face layout only")
    compilation = runner.vllm_config.compilation_config
    layers, experts = compilation.static_forward_context, compilation.static_all_moe_layers
    old_layers, old_experts, old_path = dict(layers), list(experts), runner.model_config.model
    layers.clear()
    experts.clear()
    runner.model_config.model = weights_path or old_path
    try:
        model = get_model(vllm_config=runner.vllm_config)
    except BaseException:
        layers.clear()
        layers.update(old_layers)
        experts[:] = old_experts
        runner.model_config.model = old_path
        raise
    for name, layer in layers.items():
        _take_over(layer, old_layers[name])
    runner.model = model


def _take_over(layer: Any, old: Any) -> None:
    """Give a new layer its cache, and what vLLM set on the old one after building it."""
    for name, value in vars(old).items():
        if name == "kv_cache" or name not in vars(layer):
            setattr(layer, name, value)
