"""The model being trained, as engine, env servers and trainer all need to know it."""

from __future__ import annotations

from typing import Literal

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
