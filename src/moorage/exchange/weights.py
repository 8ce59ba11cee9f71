"""Weight versions in the run folder: the trainer publishes, the orchestrator has engines load them
(docs/protocols.md section 4).

    weights/step_N/    Hugging Face layout, safetensors
    weights/step_N/READY    written last

Promises:
- a version appears whole: it is written under a temporary name and renamed, READY is written last, readers
  look at READY only;
- a READY version is never overwritten: publishing it again is a no-op, so a resumed trainer may publish its
  start version blindly;
- a reader that waits ends when its peer is gone (R35).

How the bytes get into the folder is the writer's business (a function of the folder), so that ranks can write
shards side by side, and a transfer over NCCL can take this module's place. The orchestrator removes versions.
Does not know: models, tensors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from moorage.core.errors import ExchangeError
from moorage.core.rundir import RunDir, mark_ready, ready_steps

Meet = Callable[[], object]


def _alone() -> None:
    """Meeting point of one rank."""


def publish_weights(
    run: RunDir, version: int, write: Callable[[Path], object], *, is_main: bool = True, meet: Meet = _alone
) -> bool:
    """Publish `version`: every rank calls this, and `write(folder)` puts its share of the files there.

    `is_main` makes, renames and marks the folder; `meet` is a barrier of all ranks. False when the version
    was READY already. Raises ExchangeError when the folder cannot be written.
    """
    folder = run.weight(version)
    if _agree_ready(folder, meet):
        return False
    temporary = run.weights / f".step_{version}.tmp"
    if is_main:
        for stale in (temporary, folder):  # left by an attempt that was killed before READY
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
    meet()
    try:
        write(temporary)
    except OSError as error:
        raise ExchangeError(
            f"weights of version {version} cannot be written to {temporary}: {error}"
        ) from error
    meet()
    if is_main:
        os.replace(temporary, folder)
        mark_ready(folder)
    return True


def _agree_ready(folder: Path, meet: Meet) -> bool:
    """Whether the version is READY, alike on all ranks: the main rank changes nothing before they met."""
    ready = (folder / "READY").exists()
    meet()
    return ready


def newest_version(run: RunDir) -> int | None:
    """The newest READY version, or None."""
    versions = ready_steps(run.weights)
    return versions[-1] if versions else None


def remove_version(run: RunDir, version: int) -> bool:
    """Delete a version, READY first, so that no reader ever sees a torn one. False when there was none."""
    folder = run.weight(version)
    if not folder.exists():
        return False
    (folder / "READY").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return True
