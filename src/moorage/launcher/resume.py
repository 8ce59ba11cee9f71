"""A run folder before an attempt: whether one may start there, where it resumes, and what must go first.

state of the folder                         start     --resume        --clean
nothing, or run.toml and configs/ only      yes       error           yes
a run that has ended or was killed          refused   after cleaning  after removing the folder
a run that is running                       refused   refused         refused
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moorage.core.errors import ConfigError
from moorage.core.parent import process_birth
from moorage.core.rundir import RunDir, read_json, ready_steps, whole_checkpoints

HARMLESS = frozenset({"run.toml", "configs", ".lock"})
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


def remove_run(run: RunDir, output_dir: Path) -> None:
    """`--clean`: empty the run folder. Only a folder below `output_dir` is ever removed."""
    root, parent = run.root.resolve(), output_dir.resolve()
    if parent not in root.parents or root in _NEVER:
        raise ConfigError(f"--clean: {root} does not lie below output_dir {parent}; remove it yourself")
    wait_for_leavers(run)
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


def clean_after(run: RunDir, step: int, *, keep_batches: bool) -> None:
    """Remove later weights and episodes, later batches unless kept, and every sign of life."""
    wait_for_leavers(run)
    folders = [run.weights, run.root / "episodes", run.checkpoints]
    if not keep_batches:
        folders.append(run.batches)
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            number = re.match(r"\.?step_(\d+)", path.name)
            if number and (int(number[1]) > step or path.name.startswith(".")):
                shutil.rmtree(path, ignore_errors=True)
    if keep_batches:
        _remove_batches_behind_a_gap(run, step)
    shutil.rmtree(run.alive, ignore_errors=True)
    shutil.rmtree(run.envs, ignore_errors=True)
    run.end.unlink(missing_ok=True)
    run.summary.unlink(missing_ok=True)


def _remove_batches_behind_a_gap(run: RunDir, step: int) -> None:
    """Keep the batches that follow `step` without a gap: nobody would write a missing one, so what lies
    behind it cannot be trained (the earlier attempt did not retain its batches)."""
    expected = step + 1
    for number in ready_steps(run.batches):
        if number == expected:
            expected += 1
        elif number > expected:
            shutil.rmtree(run.batch(number), ignore_errors=True)


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
