"""A model laid out over ranks with FSDP2, its weights read from the files straight into the shards.

The model is made on the meta device, sharded (each decoder block is a unit, the rest is the root's), and then
each rank reads its own slice of every tensor: no rank ever holds a full copy. A 2-D mesh replicates the
shards.

Promises: gradients are **summed** over ranks, not averaged: the step's divisors are those of the whole step.
Does not know how a row is packed or what is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError
from moorage.trainer.attention import implementation_name
from moorage.trainer.world import World


def load_sharded(
    path: Path, model: ModelConfig, trainer: TrainerConfig, world: World, dtypes: dict[str, torch.dtype]
) -> Any:
    """The model of folder `path` on `world.mesh`. Raises ConfigError when the files do not fit the model."""
    from transformers import AutoModelForCausalLM

    from moorage.trainer.model import load_model_config

    dtype = dtypes[model.dtype]
    config = load_model_config(path, dtype)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=implementation_name(trainer.attention)
        )
    compute = dtypes[trainer.param_dtype] if trainer.param_dtype else dtype
    shard(module, world, compute, _reduce_dtype(trainer, dtype, dtypes))
    module.moorage_compute_dtype = compute
    read_weights(module, path, world, dtype)
    return module


def shard(module: torch.nn.Module, world: World, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Make every block and the root FSDP units."""
    from moorage.trainer.model import find_blocks

    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in find_blocks(module):
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(module, mesh=world.mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def read_weights(module: Any, path: Path, world: World, dtype: torch.dtype) -> None:
    """Fill the shards of a meta-device model from the safetensors files in `path`, by transformers' own
    loader (which undoes the differences between files and modules), and make the buffers no file holds."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    files = sorted(str(file) for file in path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path {str(path)!r} holds no *.safetensors file")
    settings = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        device_map={"": world.device},
        device_mesh=world.mesh,
        dtype=dtype,
        weight_mapping=cast(Any, get_model_conversion_mapping(module)),
    )
    info, _ = type(module)._load_pretrained_model(module, None, files, settings)
    missing = set(info.missing_keys) - set(module.all_tied_weights_keys)
    if missing or info.mismatched_keys or info.conversion_errors:
        raise ConfigError(
            f"the weights in {path} do not fit the model: missing {sorted(missing)[:5]}, of another shape "
            f"{[entry[0] for entry in info.mismatched_keys][:5]}, "
            f"not convertible {list(info.conversion_errors)[:5]}"
        )
    type(module)._finalize_model_loading(module, settings, info)
    left = [name for name, tensor in module.state_dict(keep_vars=True).items() if tensor.is_meta]
    if left:
        raise ConfigError(f"{path}: no weights were found for {left[:5]}")


def _reduce_dtype(trainer: TrainerConfig, dtype: torch.dtype, dtypes: dict[str, torch.dtype]) -> torch.dtype:
    if trainer.reduce_dtype is not None:
        return dtypes[trainer.reduce_dtype]
    return dtype if dtype is torch.float64 else torch.float32
