"""The model under training: loading it, laying it out over ranks, running it on a packed row.

Owns: `TrainedModel`, which turns a packed row into the logits of asked positions.

Promises:
- any transformers causal LM whose attention goes through the attention interface;
- packed sequences never see each other, checked at start on the loaded model (`selfcheck`);
- dropout and router jitter are off: the trainer computes the engine's probabilities;
- with shards, weights go from the files straight into them: no rank ever holds a full copy.

Does not know: losses, batches, optimizers.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moorage.config.model import ModelConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError
from moorage.trainer.attention import PackedLayout, implementation_name, packed_as
from moorage.trainer.router_replay import RouterReplay
from moorage.trainer.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class TrainedModel:
    """A causal LM ready to train. `module` is the transformers model (sharded or not)."""

    module: Any
    world: World
    replay: RouterReplay | None

    @contextmanager
    def row(self, layout: PackedLayout, routing: torch.Tensor | None = None) -> Iterator[None]:
        """Forward and backward passes inside see one packed row: its boundaries, and the expert choices
        `routing` [T, hidden layers, k] (-1: the router decides) when they are replayed."""
        with packed_as(layout):
            if self.replay is None or routing is None:
                yield
                return
            with self.replay.replaying(routing):
                yield

    def logits(self, token_ids: torch.Tensor, layout: PackedLayout, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] at the positions `rows` [N] of the row `token_ids` [T]; call inside `row(...)`."""
        outputs = self.module(
            input_ids=token_ids[None],
            position_ids=layout.position_ids[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=rows,
        )
        return outputs.logits[0]

    def set_last_row(self, last: bool) -> None:
        """Replicas meet once per step: their all-reduce waits for the last row."""
        if self.world.mesh is not None and self.world.mesh.ndim == 2:
            self.module.set_requires_all_reduce(last)

    def reshard(self) -> None:
        """After a forward pass without a backward pass: give the root's gathered parameters back."""
        if self.world.mesh is not None:
            self.module.reshard()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.module.parameters()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def load_model(model: ModelConfig, trainer: TrainerConfig, world: World, seq_len: int) -> TrainedModel:
    """The model of folder `model.path`, laid out as `trainer` says. Raises ConfigError."""
    from moorage.trainer.selfcheck import check_packing

    path = Path(model.path)
    if trainer.compile:
        _check_compiler(world.device)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path {model.path!r} holds no config.json; give a Hugging Face model folder")
    hide_progress_bars()
    if world.mesh is None:
        module = _load_whole(path, DTYPES[model.dtype], implementation_name(trainer.attention), world.device)
    else:
        from moorage.trainer.sharding import load_sharded

        module = load_sharded(path, model, trainer, world, DTYPES)
    _check_length(module, path, seq_len)
    module.eval()  # no dropout, no jitter; gradients flow all the same
    if trainer.activation_checkpointing:
        _checkpoint_blocks(module)
    if trainer.compile:
        for block in find_blocks(module):
            block.compile()
    replay = RouterReplay(module) if trainer.router_replay else None
    loaded = TrainedModel(module, world, replay)
    check_packing(loaded)
    return loaded


def load_model_config(path: Path, dtype: torch.dtype) -> Any:
    """The folder's model config. float64 has no grouped matrix product: experts then run one by one."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if dtype is torch.float64:
        config._experts_implementation = "eager"
    return config


def hide_progress_bars() -> None:
    """Keep transformers' bars out of the log files."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder blocks: the longest list of modules in the model."""
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _load_whole(path: Path, dtype: torch.dtype, implementation: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=load_model_config(path, dtype),
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {error}") from None
    return module.to(device)


def _check_length(module: torch.nn.Module, path: Path, seq_len: int) -> None:
    longest = getattr(module.config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq_len > longest:
        raise ConfigError(f"seq_len {seq_len} is above the {longest} positions of the model in {path}")


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for a CPU; without a compiler it would fail in the middle of a step."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"trainer.compile on a CPU needs a C++ compiler, and {compiler!r} is not there; install one, "
            "name it in the environment variable CXX, or write trainer.compile = false"
        )


def _checkpoint_blocks(module: torch.nn.Module) -> None:
    """Recompute each block's activations in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in find_blocks(module):
        run = block.forward
        block.forward = lambda *args, _run=run, **kwargs: checkpoint(
            _run, *args, use_reentrant=False, **kwargs
        )  # type: ignore[method-assign]
