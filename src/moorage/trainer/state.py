"""The trainer's part of a checkpoint: saved while training goes on, whole or not at all, at any world size.

    checkpoints/step_N/trainer/       shards (torch.distributed.checkpoint), progress.json
    checkpoints/step_N/trainer/READY  written last

A checkpoint is *whole* when trainer and orchestrator parts are both READY. Promises:
- tensors are copied to the CPU before `save` returns; a thread writes them under a temporary name, renames, marks;
- one save at a time: the next one waits for the one before;
- keep-last counts whole checkpoints; one that is not whole and older than the newest whole one is removed.

Does not know when a checkpoint is due.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from moorage.config.run import CheckpointConfig
from moorage.core.errors import ConfigError, ExchangeError
from moorage.core.log import get_logger
from moorage.core.rundir import RunDir, mark_ready, step_of, write_json_atomic
from moorage.trainer.model import TrainedModel

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
        self._pending: tuple[Progress, Path, Any] | None = None

    def save(self, progress: Progress) -> None:
        """Begin to save; returns once the state is copied. Collective."""
        self.finish()
        temporary = self.run.checkpoint(progress.step, ".trainer.tmp")
        if self.model.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.model.world.barrier()
        pending = dcp.async_save(
            self._state(),
            checkpoint_id=temporary,
            process_group=self.model.world.cpu_group,
            no_dist=self.model.world.cpu_group is None,
        )
        future = pending if isinstance(pending, Future) else pending.upload_completion
        self._pending = (progress, temporary, future)

    def finish(self, *, wait: bool = True) -> int | None:
        """Mark a save READY once it is written; returns its step then. `wait`: until it is."""
        if self._pending is None or not (wait or self._pending[2].done()):
            return None
        progress, temporary, future = self._pending
        future.result(SAVE_TIMEOUT_S)
        self._pending = None
        if self.model.world.is_main:
            write_json_atomic(temporary / "progress.json", asdict(progress))
            final = self.run.checkpoint(progress.step, "trainer")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            mark_ready(final)
        return progress.step

    def load(self, step: int) -> Progress:
        """Restore model and optimizer from the checkpoint of `step`, at whatever world size. Collective."""
        folder = self.run.checkpoint(step, "trainer")
        if not (folder / "READY").exists():
            raise ConfigError(f"{folder} holds no whole trainer checkpoint to resume from")
        state = self._state()
        try:
            dcp.load(
                state,
                checkpoint_id=folder,
                process_group=self.model.world.cpu_group,
                no_dist=self.model.world.cpu_group is None,
            )
        except (OSError, dcp.api.CheckpointException) as error:
            raise ExchangeError(f"{folder} cannot be read: {error}") from error
        set_state_dict(
            self.model.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return Progress(**json.loads((folder / "progress.json").read_text()))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def whole_checkpoints(run: RunDir) -> list[int]:
    """Ascending steps whose trainer and orchestrator parts are both READY."""
    return [step for step in _checkpoint_steps(run) if is_whole(run, step)]


def is_whole(run: RunDir, step: int) -> bool:
    """Whether both parts of the checkpoint of `step` are READY."""
    return all((run.checkpoint(step, part) / "READY").exists() for part in ("trainer", "orchestrator"))


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
    removed = [step for step in _checkpoint_steps(run) if step <= whole[-1] and step not in kept]
    for step in removed:
        folder = run.checkpoints / f"step_{step}"
        for part in ("trainer", "orchestrator"):
            (folder / part / "READY").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _checkpoint_steps(run: RunDir) -> list[int]:
    if not run.checkpoints.is_dir():
        return []
    steps = (step_of(path) for path in run.checkpoints.iterdir())
    return sorted(step for step in steps if step is not None)
