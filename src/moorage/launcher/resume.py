"""A run folder before an attempt: whether one may start there, where it resumes, and what must go first.

state of the folder                         start     --resume        --clean
nothing, or what a dry run leaves           yes       error           yes
a run that has ended or was killed          refused   after cleaning  after removing the folder
a run that is running                       refused   refused         refused

Cleaning and removing are the caller's last steps: whatever can be refused is refused before them. Both want
that no process of an earlier attempt runs (`wait_for_leavers`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moorage.config.run import CheckpointConfig
from moorage.core.errors import ConfigError
from moorage.core.parent import process_birth
from moorage.core.rundir import RunDir, read_json, ready_steps, whole_checkpoints
from moorage.exchange.batches import read_state, write_state
from moorage.monitor.files import keep_rows

DRY_RUN = "dry-run"
HARMLESS = frozenset({"run.toml", "configs", DRY_RUN, ".lock"})
LEAVE_WITHIN_S = 30.0
_NEVER = {Path("/"), Path.home(), Path.cwd()}


@contextmanager
def hold(run: RunDir) -> Iterator[None]:
    """Keep every other launcher out of this run folder; raise ConfigError when one is in it."""
    run.root.mkdir(parents=True, exist_ok=True)
    with open(run.root / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{run}: a launcher is running this run now") from None
        yield


def holds_run(run: RunDir) -> bool:
    """Whether the folder holds more than a dry run leaves."""
    return run.root.is_dir() and any(path.name not in HARMLESS for path in run.root.iterdir())


def check_removable(run: RunDir, output_dir: Path) -> None:
    """Raise ConfigError unless the run folder lies below `output_dir`: only such a folder is ever removed."""
    root, parent = run.root.resolve(), output_dir.resolve()
    if parent not in root.parents or root in _NEVER:
        raise ConfigError(f"--clean: {root} does not lie below output_dir {parent}; remove it yourself")


def remove_run(run: RunDir, output_dir: Path) -> None:
    """`--clean`: empty the run folder. Raises ConfigError as `check_removable` does."""
    check_removable(run, output_dir)
    for path in run.root.iterdir():
        if path.name == ".lock":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def resume_facts(run: RunDir) -> tuple[str, int, int]:
    """(run id, attempt, step) of the attempt to start. Raises ConfigError when there is nothing to resume."""
    if not holds_run(run):
        raise ConfigError(f"--resume: {run} holds no run")
    steps = whole_checkpoints(run)
    if not steps:
        raise ConfigError(
            f"--resume: {run} holds no whole checkpoint (checkpoint.interval makes them); --clean starts anew"
        )
    written = read_json(run.configs / "orchestrator.json") or {}
    facts = written.get("facts")
    if not facts:
        raise ConfigError(
            f"--resume: {run.configs / 'orchestrator.json'} is missing; the run cannot be told apart"
        )
    return facts["run_id"], facts["attempt"] + 1, steps[-1]


def clean_after(run: RunDir, step: int, *, keep_batches: bool) -> int:
    """Remove what the coming attempt makes again, and every sign of life of those before it.

    The trainer goes on after `step`, and so does the orchestrator; with `keep_batches` the latter goes on
    after the newest batch that follows `step` without a gap. Returns the step after which it goes on.
    """
    shipped = _last_in_a_row(run, step) if keep_batches else step
    for folder, last in (
        (run.weights, step),
        (run.checkpoints, step),
        (run.batches, shipped),
        (run.root / "episodes", shipped),
    ):
        _remove_steps_after(folder, last)
    for number in range(step + 1, shipped + 1):  # these versions come again, and are measured again
        shutil.rmtree(run.traces(number, "eval", "all").parents[1], ignore_errors=True)
    keep_rows(run.metrics("trainer"), lambda row: row["step"] <= step)
    keep_rows(run.metrics("orchestrator"), lambda row: row["step"] <= (step if _measures(row) else shipped))
    shutil.rmtree(run.alive, ignore_errors=True)
    shutil.rmtree(run.envs, ignore_errors=True)
    run.end.unlink(missing_ok=True)
    run.summary.unlink(missing_ok=True)
    return shipped


def write_parts(
    run: RunDir, step: int, shipped: int, checkpoint: CheckpointConfig, *, last_step: int
) -> None:
    """Write the orchestrator's part of each checkpoint after `step` up to `shipped`, from the kept batches.

    The coming attempt ships none of these batches, so its orchestrator writes none of these parts, and
    without them the checkpoints would never be whole. `last_step`: of the coming attempt.
    """
    for number in range(step + 1, shipped + 1):
        if checkpoint.is_due(number, last_step):
            write_state(run.checkpoint(number, "orchestrator"), read_state(run, number))


def _last_in_a_row(run: RunDir, step: int) -> int:
    """The last step whose batch follows `step` without a gap: nobody would write a missing one, so what lies
    behind it cannot be trained (the earlier attempt did not retain its batches)."""
    ready = set(ready_steps(run.batches))
    while step + 1 in ready:
        step += 1
    return step


def _remove_steps_after(folder: Path, last: int) -> None:
    """Remove `step_N` folders of N above `last`, and all that an attempt was writing when it was killed."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.match(r"\.?step_(\d+)", path.name)
        if number and (int(number[1]) > last or path.name.startswith(".")):
            shutil.rmtree(path, ignore_errors=True)


def _measures(row: Mapping[str, Any]) -> bool:
    """Whether it is the row of a measurement: its step is the version that was measured."""
    return any(name.startswith("eval/") for name in row)


def wait_for_leavers(run: RunDir, within_s: float = LEAVE_WITHIN_S) -> None:
    """Wait until no process of an earlier attempt runs on this machine; they end by themselves (R35)."""
    deadline = time.monotonic() + within_s
    while left := list(_leavers(run)):
        if time.monotonic() > deadline:
            names = ", ".join(f"{name} (pid {pid})" for name, pid in left)
            raise ConfigError(f"{run}: processes of an earlier attempt still run: {names}; end them first")
        time.sleep(0.2)


def _leavers(run: RunDir) -> Iterator[tuple[str, int]]:
    for path in run.alive.rglob("*.json") if run.alive.is_dir() else ():
        beat = read_json(path) or {}
        pid = int(beat.get("pid", 0))
        if pid and pid != os.getpid() and process_birth(pid) is not None and _is_ours(pid):
            yield str(beat.get("process", path.stem)), pid


def _is_ours(pid: int) -> bool:
    try:
        return b"moorage" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
