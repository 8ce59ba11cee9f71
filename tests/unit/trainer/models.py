"""Tiny random models of many families, and forward passes one sequence at a time to compare with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moorage.trainer.attention import implementation_name
from moorage.trainer.model import TrainedModel
from moorage.trainer.world import World

SHARED: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MOE = {**SHARED, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SHARED},
    "llama": {"model_type": "llama", **SHARED},
    "mistral_sliding": {"model_type": "mistral", **SHARED, "sliding_window": 4},
    "gemma3_sliding": {
        "model_type": "gemma3_text",
        **SHARED,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "norm_topk_prob": True},
    "qwen3_moe_dense": {"model_type": "qwen3_moe", **MOE, "num_hidden_layers": 3, "mlp_only_layers": [0]},
    "qwen2_moe": {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 16},
    "mixtral": {"model_type": "mixtral", **SHARED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", **MOE, "intermediate_size": 16},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SHARED,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **SHARED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
    },
}


def make_module(family: str, implementation: str = "packed_sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """A random model of the family; the same weights every time."""
    torch.manual_seed(0)
    fields = dict(FAMILIES[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=implementation_name(implementation)
    )
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)  # far from uniform, so that a leak shows
    return module.eval()


def make_model(family: str, **options: Any) -> TrainedModel:
    return TrainedModel(make_module(family, **options), World(0, 1, torch.device("cpu")), None)


def alone(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, V] of one sequence under transformers' own attention and masks."""
    own = module.config._attn_implementation
    module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    logits = module(input_ids=ids[None], use_cache=False).logits[0]
    module.set_attn_implementation(own)
    return logits.log_softmax(-1)


def gradients(module: Any, total: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of `total` by parameter name."""
    module.zero_grad(set_to_none=True)
    total.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
