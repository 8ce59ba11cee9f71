"""What can be known to be wrong before anything starts, each as one `ConfigError` that says what to do.

Nothing here imports verifiers or torch: a taskset is looked for, not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moorage.config.env import SourceConfig
from moorage.config.run import DerivedConfigs
from moorage.core.errors import ConfigError
from moorage.core.net import find_free_port, is_port_free
from moorage.launcher.plan import Devices


def read_model_config(path: str) -> dict[str, Any]:
    """The `config.json` of the model folder `path`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: there is no folder {path!r}; make a starter model with `moorage sft @ ...`, "
            "or name a folder in Hugging Face layout"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"model.path: {path!r} holds no config.json; it is no model folder in Hugging Face layout"
        ) from None
    except ValueError as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} is not valid JSON ({error})") from None
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path: {path!r} holds no *.safetensors weights")
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"model.path: {path!r} holds no tokenizer.json")
    return config


def check_length(seq_len: int, model: dict[str, Any]) -> None:
    """Raise when sequences may be longer than the model, whose `config.json` this is, has positions."""
    longest = (model.get("text_config") or model).get("max_position_embeddings")
    if isinstance(longest, int) and seq_len > longest:
        raise ConfigError(
            f"seq_len {seq_len} is above the model's max_position_embeddings {longest}; set it to {longest} "
            "or less"
        )


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """`count` ports from `first` on, or free ones when `first` is 0."""
    if first:
        return [first + index for index in range(count)]
    ports: list[int] = []
    while len(ports) < count:
        port = find_free_port(host)
        if port not in ports:
            ports.append(port)
    return ports


def check_ports(host: str, ports: Iterable[int], setting: str) -> None:
    """Raise when a port is taken."""
    for port in ports:
        if not is_port_free(host, port):
            raise ConfigError(
                f"{setting}: port {port} on {host} is in use; choose another, or 0 for a free one"
            )


def check_source(split: str, source: SourceConfig) -> None:
    """Raise when the taskset or environment that a source names is not installed."""
    where = f"orchestrator.{'train' if split == 'train' else 'eval.sources'} {source.name!r}"
    taskset = source.env.get("taskset")
    ids = [("taskset.id", taskset.get("id") if isinstance(taskset, dict) else None, "tasksets")]
    ids.append(("id", source.env.get("id"), "envs"))
    for key, ident, group in ids:
        if ident is not None and not is_installed(str(ident), group):
            raise ConfigError(
                f"{where}: env.{key} {ident!r} cannot be imported; install the package that provides it into "
                "this environment, or correct the name"
            )


def is_installed(ident: str, group: str) -> bool:
    """Whether verifiers would find the plugin `ident` (of its package `group`): as its own or as a module."""
    module = ident.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    verifiers = importlib.util.find_spec("verifiers")
    for folder in (verifiers.submodule_search_locations or ()) if verifiers else ():
        built_in = Path(folder) / "v1" / group / module
        if built_in.is_dir() or built_in.with_suffix(".py").is_file():
            return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def share_devices(derived: DerivedConfigs, available: int | None = None) -> Devices:
    """CUDA devices for engines and trainer: the engines get the first, the trainer the next.

    `available`: how many there are (None: looked up). One device is shared by all; who asks for `cpu` gets
    none. Raises ConfigError when there are some but too few.
    """
    count = _count_devices() if available is None else available
    engines = [e.inference for e in derived.inference if e.inference.device in ("auto", "cuda")]
    ranks = derived.trainer.trainer.num_ranks if derived.trainer.trainer.device != "cpu" else 0
    sizes = [engine.tensor_parallel_size * engine.data_parallel_size for engine in engines]
    if count == 0 or (count == 1 and max([*sizes, ranks]) <= 1):
        return Devices()
    if sum(sizes) + ranks > count:
        raise ConfigError(
            f"the engines need {sum(sizes)} devices and the trainer {ranks}, and there are {count}; lower "
            "inference.replicas, inference.tensor_parallel_size or trainer.num_ranks"
        )
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    shares = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    first = sum(sizes)
    return Devices(tuple(shares), tuple(range(first, first + ranks)) if ranks else None)


def _count_devices() -> int:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
