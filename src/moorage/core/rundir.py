"""The run folder: where everything lies, and how processes see each other die.

    <output_dir>/<run name>/
      run.toml  configs/  logs/  envs/  alive/  batches/  weights/  spool/  checkpoints/
      episodes/  metrics/  END.json  summary.json

Promises:
- every file is written under a temporary name and renamed, so a reader never sees half a file;
- `Heartbeat` rewrites `alive/<process>.json` every 5 s;
- a wait on a peer's file polls `PeerWatch.check()`, which raises `RunEnded` when END.json exists or the
  peer's heartbeat is 60 s old (R35). A peer that has not begun yet has `start_timeout_s` to do so.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from moorage.core.errors import RunEnded

HEARTBEAT_S = 5.0
DEAD_AFTER_S = 60.0


class RunDir:
    """Paths of one run. Creates nothing by itself."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    @property
    def run_toml(self) -> Path:
        return self.root / "run.toml"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, process: str) -> Path:
        """Log file of a process; an env server's process name is `envs/<split>/<name>.<node>`."""
        return self.logs / f"{process}.log"

    @property
    def envs(self) -> Path:
        return self.root / "envs"

    def address(self, split: str, store: str) -> Path:
        """Address file of one env-server replica; `store` is `<name>.<node>`."""
        return self.envs / split / f"{store}.address"

    @property
    def alive(self) -> Path:
        return self.root / "alive"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step}"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weight(self, version: int) -> Path:
        return self.weights / f"step_{version}"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int, part: str) -> Path:
        """`part` is `trainer` or `orchestrator`."""
        return self.checkpoints / f"step_{step}" / part

    def traces(self, step: int, split: str, subset: str) -> Path:
        """`split` is train or eval, `subset` all or effective."""
        return self.root / "episodes" / f"step_{step}" / split / subset / "traces.jsonl"

    def metrics(self, process: str) -> Path:
        return self.root / "metrics" / f"{process}.jsonl"

    @property
    def end(self) -> Path:
        return self.root / "END.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_bytes_atomic` of indented JSON."""
    write_bytes_atomic(path, json.dumps(value, indent=2, default=str).encode() + b"\n")


def read_json(path: Path) -> Any | None:
    """The parsed file, or None when there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def write_end(run: RunDir, status: str, error: str | None = None) -> bool:
    """Write END.json unless it exists; `status` is finished, failed or cancelled. True when written."""
    run.root.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"status": status, "error": error, "time": time.time()}, indent=2)
    temporary = run.root / f".END.{uuid.uuid4().hex[:8]}.tmp"
    temporary.write_text(body)
    try:
        os.link(temporary, run.end)  # fails when it exists: the first ending is the one that counts
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


class Heartbeat:
    """Rewrites `alive/<process>.json` every 5 s from a thread of its own until `stop()`.

    A thread, not a task: a busy event loop is slow, not dead.
    """

    def __init__(self, run: RunDir, process: str) -> None:
        self.path = run.alive / f"{process}.json"
        self.process = process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{process}", daemon=True)

    def start(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _write(self) -> None:
        write_json_atomic(self.path, {"process": self.process, "pid": os.getpid(), "time": time.time()})

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self._write()
            except OSError:
                if self.path.parent.parent.exists():  # a full disk may recover; a removed run folder will not
                    continue
                return

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class PeerWatch:
    """What a wait on a peer's file asks each time it polls."""

    def __init__(self, run: RunDir, peer: str, *, start_timeout_s: float = 600.0) -> None:
        self.run = run
        self.peer = peer
        self.start_timeout_s = start_timeout_s
        self._since = time.time()

    def check(self) -> None:
        """Raise RunEnded when the peer cannot be expected to act any more."""
        end = read_json(self.run.end)
        if end is not None:
            raise RunEnded(f"the run has ended ({end.get('status')}): {end.get('error') or 'no error'}")
        beat = read_json(self.run.alive / f"{self.peer}.json")
        now = time.time()
        if beat is None:
            if now - self._since > self.start_timeout_s:
                raise RunEnded(f"{self.peer} has not started within {self.start_timeout_s:g} s")
        elif now - max(beat["time"], self._since) > DEAD_AFTER_S:
            raise RunEnded(
                f"{self.peer} (pid {beat['pid']}) has given no sign of life for {DEAD_AFTER_S:g} s"
            )


def step_of(path: Path) -> int | None:
    """N of a folder named `step_N`, else None."""
    name = path.name
    return int(name[5:]) if name.startswith("step_") and name[5:].isdigit() else None


def ready_steps(folder: Path) -> list[int]:
    """Ascending N of the `step_N` folders in `folder` that hold READY."""
    if not folder.is_dir():
        return []
    steps = (step_of(path) for path in folder.iterdir() if (path / "READY").exists())
    return sorted(step for step in steps if step is not None)


def checkpoint_steps(run: RunDir) -> list[int]:
    """Ascending steps that have a checkpoint, whole or not."""
    if not run.checkpoints.is_dir():
        return []
    return sorted(step for path in run.checkpoints.iterdir() if (step := step_of(path)) is not None)


def whole_checkpoints(run: RunDir) -> list[int]:
    """Ascending steps whose checkpoint is whole: its trainer and orchestrator parts are both READY."""
    parts = ("trainer", "orchestrator")
    return [
        step
        for step in checkpoint_steps(run)
        if all((run.checkpoint(step, part) / "READY").exists() for part in parts)
    ]


def mark_ready(folder: Path) -> None:
    """Put READY into `folder`; the last thing a writer does."""
    write_bytes_atomic(folder / "READY", b"")
