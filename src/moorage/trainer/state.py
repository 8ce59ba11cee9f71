"""The trainer's part of a checkpoint: saved while training goes on, whole or not at all, at any world size.

    checkpoints/step_N/trainer/       shards (torch.distributed.checkpoint), progress.json
    checkpoints/step_N/trainer/READY  written last

A checkpoint is *whole* when trainer and orchestrator parts are both READY. Promises:
- tensors are copied to the CPU before `save` returns; a thread writes them under a temporary name, then the
  folder is renamed and marked;
- one save at a time: the next one waits for the one before;
- keep-last counts whole checkpoints; one that is not whole and older than the newest whole one is removed.

Does not know when a checkpoint is due.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from moorage.config.run import CheckpointConfig
from moorage.core.errors import ConfigError, ExchangeError
from moorage.core.log import get_logger
from moorage.core.rundir import RunDir, checkpoint_steps, mark_ready, whole_checkpoints, write_json_atomic
from moorage.trainer.model import TrainedModel
from moorage.trainer.world import World

log = get_logger(__name__)

SAVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Progress:
    """What the trainer counts over a run's whole life."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


class CheckpointStore:
    """Saves and loads the trainer's parts in one run folder. Collective where it says so."""

    def __init__(self, run: RunDir, model: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Progress, Path, Future[None]] | None = None

    def save(self, progress: Progress) -> None:
        """Begin to save; returns once the state is copied. Collective."""
        self.finish()
        temporary = self.run.checkpoint(progress.step, ".trainer.tmp")
        if self.model.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.model.world.barrier()
        staged = stage_on_cpu(self._state(), self.model.world)
        self._pending = (progress, temporary, self._thread.submit(self._write, staged, temporary))

    def _write(self, staged: dict[str, Any], folder: Path) -> None:
        """On the thread: all ranks' shards and their index. Collective, in a group of its own."""
        group = self.model.world.cpu_group
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that a single process saves alone, which is meant
            save(staged, checkpoint_id=folder, process_group=group, no_dist=group is None)

    def finish(self, *, wait: bool = True) -> int | None:
        """Mark a save READY once it is written; returns its step then. `wait`: until it is."""
        if self._pending is None or not (wait or self._pending[2].done()):
            return None
        progress, temporary, future = self._pending
        try:
            future.result(SAVE_TIMEOUT_S)
        except (OSError, TimeoutError, CheckpointException) as error:
            raise ExchangeError(f"the checkpoint of step {progress.step} cannot be saved: {error}") from error
        self._pending = None
        if self.model.world.is_main:
            write_json_atomic(temporary / "progress.json", asdict(progress))
            final = self.run.checkpoint(progress.step, "trainer")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            mark_ready(final)
        return progress.step

    def close(self) -> None:
        """Wait for the writing thread and mark what it wrote: an end one step later loses no checkpoint."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._pending is None:
            return
        progress, _, future = self._pending
        if future.cancelled() or future.exception() is not None:
            log.warning("the checkpoint of step %d was not written and is left out", progress.step)
            return
        self.finish()

    def load(self, step: int) -> Progress:
        """Restore model and optimizer from the checkpoint of `step`, at whatever world size. Collective.

        Moments come from the checkpoint, the optimizer's settings stay those it was made with: a resume may
        change them. Raises ConfigError when there is no whole checkpoint, or when it is of another model.
        """
        folder = self.run.checkpoint(step, "trainer")
        if not (folder / "READY").exists():
            raise ConfigError(f"{folder} holds no whole trainer checkpoint to resume from")
        state = self._state()
        try:
            _check_model(folder, state["model"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(state, checkpoint_id=folder, no_dist=self.model.world.cpu_group is None)
        except (OSError, CheckpointException) as error:
            raise ExchangeError(f"{folder} cannot be read: {error}") from error
        settings = [_settings(group) for group in self.optimizer.param_groups]
        set_state_dict(
            self.model.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        return Progress(**json.loads((folder / "progress.json").read_text()))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def _check_model(folder: Path, model: dict[str, Any]) -> None:
    """Raise ConfigError unless the checkpoint holds tensors of just these names and shapes."""
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(tensor.shape) for name, tensor in model.items() if isinstance(tensor, torch.Tensor)}
    differing = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{folder} is of another model: {len(differing)} tensors differ, {name} has shape "
            f"{saved.get(name)} there and {own.get(name)} in the model; resume with the model.path that "
            "the run began with"
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def stage_on_cpu(value: Any, world: World) -> Any:
    """A copy of nested state on the CPU, shards staying shards: training may go on while it is written."""
    if isinstance(value, dict):
        return {key: stage_on_cpu(item, world) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(stage_on_cpu(item, world) for item in value)
    if isinstance(value, DTensor):
        local = value.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(
            local, world.cpu_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def prune_checkpoints(run: RunDir, config: CheckpointConfig) -> list[int]:
    """Remove checkpoints that `keep_last` and `keep_interval` do not keep; returns their steps.

    Without either setting all whole ones stay.
    """
    whole = whole_checkpoints(run)
    if not whole:
        return []
    kept = set(whole)
    if config.keep_last is not None or config.keep_interval is not None:
        kept = set(whole[-config.keep_last :]) if config.keep_last else {whole[-1]}
        kept |= {step for step in whole if config.keep_interval and step % config.keep_interval == 0}
    removed = [step for step in checkpoint_steps(run) if step <= whole[-1] and step not in kept]
    for step in removed:
        folder = run.checkpoints / f"step_{step}"
        for part in ("trainer", "orchestrator"):
            (folder / part / "READY").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return removed
