"""The model being trained, as engine, env servers and trainer all need to know it."""

from __future__ import annotations

from typing import Any, Literal

from moorage.config.base import Config


class ModelConfig(Config):
    """Which model, and how conversations become tokens."""

    path: str
    """Folder in Hugging Face layout (config.json, safetensors, tokenizer) that training starts from."""

    name: str = "policy"
    """Name under which the engine serves it."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the trainer's master weights. float32 unless memory forbids it."""

    renderer: str = "auto"
    """Renderer that turns messages into token ids: a name known to `renderers`, or `auto` (by model; the
    tokenizer's own chat template when the model is not known)."""


_EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)


def is_mixture_of_experts(described: dict[str, Any]) -> bool:
    """Whether a model's config.json (or its text part) describes more than one expert."""
    parts = [described, described.get("text_config") or {}]
    return any((part.get(key) or 0) > 1 for part in parts for key in _EXPERT_KEYS)
