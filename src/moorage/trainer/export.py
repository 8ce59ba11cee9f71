"""Writing a model in Hugging Face layout, without a full copy on any rank.

Parameters are gathered one after the other; each belongs to one rank, which keeps it until it has a file's
worth and writes that file. Names and shapes are those of the folder the model came from (transformers'
conversions are undone), tied weights are stored once.

Promises: the files together hold exactly the full state dict, bit for bit; parameters that are not finite are
refused; the index and the small files (config, tokenizer) are written by the main rank. Does not know when a
version is due, nor where it goes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from moorage.core.errors import TrainingError
from moorage.trainer.model import TrainedModel

FILE_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_COPY_BELOW_BYTES = 1 << 20


class Exporter:
    """Writes the current weights of one model, again and again, into new folders."""

    def __init__(self, model: TrainedModel, source: Path, file_bytes: int = FILE_BYTES) -> None:
        self.model = model
        self.source = source
        self.file_bytes = file_bytes
        self._groups = _convertible_groups(model.module)

    def write(self, folder: Path) -> None:
        """Write this rank's share into `folder`, which exists. Collective: every rank calls it.

        Raises TrainingError, on every rank, when a parameter holds NaN or infinity.
        """
        world = self.model.world
        parameters = dict(self.model.module.named_parameters())
        tensors = parameters | _persistent_buffers(self.model.module)
        held: dict[str, torch.Tensor] = {}
        placed: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(self._groups):
            full = {name: _gather(tensors[name]) for name in group}
            _require_finite({name: full[name] for name in group if name in parameters})
            if number % world.size != world.rank:
                continue
            held |= self._as_on_disk(full)
            if sum(map(_nbytes, held.values())) >= self.file_bytes:
                placed |= self._write_file(folder, held, len(placed))
                held = {}
        if held:
            placed |= self._write_file(folder, held, len(placed))
        if world.size == 1 and len({name for name, _ in placed.values()}) <= 1:
            _rename_single(folder, placed)
        else:
            _write_part(folder, world.rank, placed)
            world.barrier()
            if world.is_main:
                _merge_parts(folder, world.size)
        if world.is_main:
            add_small_files(self.source, folder)
            _name_dtype(folder, next(self.model.module.parameters()).dtype)

    def _as_on_disk(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Under the names and shapes of the model's files, on the CPU."""
        from transformers.core_model_loading import revert_weight_conversion

        reverted = revert_weight_conversion(self.model.module, tensors)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in reverted.items()}

    def _write_file(
        self, folder: Path, held: dict[str, torch.Tensor], number: int
    ) -> dict[str, tuple[str, int]]:
        from safetensors.torch import save_file

        name = f"model-{self.model.world.rank:05d}-{number:06d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        return {key: (name, _nbytes(tensor)) for key, tensor in held.items()}


def add_small_files(source: Path, folder: Path) -> None:
    """Put config, tokenizer and whatever else is not weights from `source` beside the weights in `folder`."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name in ("READY", INDEX):
            continue
        if path.suffix in _WEIGHT_FILES or (folder / path.name).exists():
            continue
        if path.stat().st_size < _COPY_BELOW_BYTES:
            shutil.copyfile(path, folder / path.name)
            continue
        try:
            os.link(path, folder / path.name)
        except OSError:  # another file system
            shutil.copyfile(path, folder / path.name)


def _name_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let config.json name the dtype that the weights have, which need not be the source's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")


def _convertible_groups(module: Any) -> list[list[str]]:
    """Names of the tensors to store, those that transformers joins on disk together."""
    from transformers.core_model_loading import WeightConverter, apply_converters

    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(module, add_legacy=False)
    reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    groups: dict[str, list[str]] = {}
    names = [name for name, _ in module.named_parameters()] + list(_persistent_buffers(module))
    for name in names:
        renamed, pattern = apply_converters(name, converters)
        groups.setdefault(name if pattern is None else renamed, []).append(name)
    return list(groups.values())


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    stored = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full().detach() if full is not None else tensor.detach()


def _require_finite(parameters: dict[str, torch.Tensor]) -> None:
    for name, values in parameters.items():
        if not bool(torch.isfinite(values).all()):
            raise TrainingError(
                f"parameter {name} holds values that are not finite: these weights are neither published "
                "nor saved. Start again, from the last checkpoint where there is one, with a lower "
                "optimizer.lr or a larger optimizer.eps"
            )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rename_single(folder: Path, placed: dict[str, tuple[str, int]]) -> None:
    for name in {name for name, _ in placed.values()}:
        os.replace(folder / name, folder / "model.safetensors")


def _write_part(folder: Path, rank: int, placed: dict[str, tuple[str, int]]) -> None:
    (folder / f".part-{rank}.json").write_text(json.dumps(placed))


def _merge_parts(folder: Path, size: int) -> None:
    """One index from the ranks' parts."""
    placed: dict[str, tuple[str, int]] = {}
    for rank in range(size):
        part = folder / f".part-{rank}.json"
        placed |= json.loads(part.read_text())
        part.unlink()
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in placed.values())},
        "weight_map": {key: name for key, (name, _) in sorted(placed.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
