"""The start-up check that packed sequences do not see each other, on the model that was just loaded.

transformers recognises packing by itself in some models and settings and silently not in others, and
recurrent layers carry state over a boundary unless told: so the trainer measures instead of trusting.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moorage.core.errors import ConfigError
from moorage.trainer.attention import PACKED_SDPA, make_layout

if TYPE_CHECKING:
    from moorage.trainer.model import TrainedModel

LENGTHS = (7, 3, 12)
# Largest mean difference of log-probabilities; leaks measured 0.5 and more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def check_packing(model: TrainedModel) -> float:
    """Compare a packed row with its sequences one by one under transformers' own attention.

    Returns the mean difference of log-probabilities. Raises ConfigError when they differ by more than
    rounding, or are not finite.
    """
    module, device = model.module, model.world.device
    vocab = int(module.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(10, vocab - 1), vocab, (sum(LENGTHS),), generator=generator).to(device)
    rows = torch.arange(len(ids), device=device)
    layout = make_layout(LENGTHS, device)
    with torch.no_grad():
        with model.row(layout):
            packed = model.logits(ids, layout, rows).float().log_softmax(-1)
        alone = torch.cat([_alone(model, part) for part in ids.split(LENGTHS)])
    model.reshard()
    difference = float((packed - alone).abs().mean())
    dtype = packed_dtype(module)
    if not math.isfinite(difference):
        raise ConfigError(
            f"{type(module).__name__} gives log-probabilities that are not finite: the weights of its folder "
            f"hold NaN or infinity, or are too large for {dtype}"
        )
    if not difference <= TOLERANCE.get(dtype, 1e-3):
        raise ConfigError(
            f"{type(module).__name__} with attention {module.config._attn_implementation!r} lets packed "
            f"sequences see each other (log-probabilities differ by {difference:.2g}); set trainer.attention "
            f"= {PACKED_SDPA!r}, or a model without recurrent layers"
        )
    return difference


def packed_dtype(module: torch.nn.Module) -> torch.dtype:
    """Dtype that the module computes in."""
    return getattr(module, "moorage_compute_dtype", None) or next(module.parameters()).dtype


def _alone(model: TrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of one sequence in a row of its own, by transformers' reference attention."""
    module = model.module
    own = module.config._attn_implementation
    module.set_attn_implementation("sdpa" if getattr(module, "_supports_sdpa", False) else "eager")
    try:
        outputs = module(input_ids=ids[None], use_cache=False)
    finally:
        module.set_attn_implementation(own)
    return outputs.logits[0].float().log_softmax(-1)
