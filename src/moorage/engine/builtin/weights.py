"""Reading a folder of weights, whole or not at all.

`read_weights` gives every tensor the model needs, by the model's own names, or raises EngineError and has
changed nothing. A folder whose names are the model's own is read straight from its safetensors files; any
other Hugging Face layout (fused and unfused experts, for one) goes through transformers' own conversion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from moorage.core.errors import EngineError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_weights(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name to CPU tensor for every parameter and stored buffer of `model`, from `folder`.

    Raises EngineError when the folder is missing, lacks a file or a tensor, holds a torn file, or a tensor of
    another shape.
    """
    files = list_files(folder)
    wanted = model_tensors(model)
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(wanted)
    found: dict[str, Path] = {}
    for path in files:
        for name in _names(path):
            found[name] = path
    if set(wanted) <= set(found) and set(found) - set(wanted) <= aliases:
        return _read_direct(files, wanted)
    return _read_converted(folder, model, wanted)


def model_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's own tensors by name, tied ones once."""
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in state.items() if name not in shared}
    return {**{name: parameter.data for name, parameter in parameters.items()}, **buffers}


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a weights folder. Raises EngineError when there is none, or one is missing."""
    if not folder.is_dir():
        raise EngineError(f"weights folder {folder} does not exist", status=400)
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise EngineError(f"{index} is torn or not an index ({error!r})", status=400) from None
    elif (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        raise EngineError(f"weights folder {folder} holds neither {SINGLE} nor {INDEX}", status=400)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise EngineError(f"weights folder {folder} lacks {', '.join(missing)}", status=400)
    return [folder / name for name in names]


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path} is torn or not a safetensors file ({error})", status=400) from None


def _read_direct(files: list[Path], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in wanted:
                        tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} cannot be read ({error})", status=400) from None
    _check_shapes(tensors, wanted, str(files[0].parent))
    return tensors


def _read_converted(
    folder: Path, model: PreTrainedModel, wanted: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not (folder / "config.json").is_file():
        raise EngineError(
            f"weights in {folder} have other names than the model and there is no config.json", status=400
        )
    try:
        answer: Any = type(model).from_pretrained(
            folder, dtype=model.dtype, output_loading_info=True, local_files_only=True
        )
        loaded, info = answer
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise EngineError(f"weights in {folder} do not fit the model ({error})", status=400) from None
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(key):
            raise EngineError(
                f"weights in {folder} do not fit the model: {key} {sorted(info[key])[:5]}", status=400
            )
    tensors = model_tensors(loaded)
    _check_shapes(tensors, wanted, str(folder))
    return tensors


def _check_shapes(tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], source: str) -> None:
    for name, tensor in wanted.items():
        given = tensors.get(name)
        if given is None or given.shape != tensor.shape:
            shape = "nothing" if given is None else f"shape {tuple(given.shape)}"
            raise EngineError(
                f"{source}: {name} has {shape}, the served model has {tuple(tensor.shape)}", status=400
            )
