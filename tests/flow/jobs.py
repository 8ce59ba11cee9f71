"""Builders for tests that run a whole job: a run file, the `moorage rl` process, and what is seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moorage.core.rundir import RunDir

TOML = """
name = "job"
max_steps = {max_steps}
seq_len = 256
[model]
path = "{model}"
[inference]
max_model_len = 64
[orchestrator]
batch_size = 8
group_size = 4
max_inflight = 16
drop = {{ zero_advantage = false }}
sampling = {{ max_tokens = 8 }}
[[orchestrator.train]]
num_workers = 2
deadline_s = 60.0
env = {{ taskset = {{ id = "moorage.tasksets.reverse_text" }} }}
[trainer.optimizer]
lr = 1e-4
"""


@dataclass
class Job:
    """A run folder and the launcher that works on it."""

    run: RunDir
    process: subprocess.Popen[str]

    def metrics(self, name: str = "trainer") -> list[dict[str, Any]]:
        """Whole lines of a metrics file."""
        try:
            text = self.run.metrics(name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        """Wait until the trainer has logged `step`."""
        wait_until(lambda: len(self.metrics()) >= step or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None, self.process.communicate()

    def finish(self, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the launcher."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def end(self) -> None:
        """Kill the launcher and all that it started, whatever state they are in."""
        left = self.processes()
        self.process.kill()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.communicate()

    def summary(self) -> dict[str, Any]:
        return json.loads(self.run.summary.read_text())

    def processes(self) -> list[psutil.Process]:
        """Everything that was started for this job, the launcher aside."""
        return started_by(self.process.pid)


class Keeper:
    """Links files away as they appear, since both batches and blobs are removed once they are used."""

    def __init__(self, root: Path, patterns: tuple[str, ...], folder: Path) -> None:
        self.root, self.patterns, self.folder = root, patterns, folder
        folder.mkdir()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            for pattern in self.patterns:
                with contextlib.suppress(FileNotFoundError):  # a folder went while it was listed
                    for file in self.root.glob(pattern):
                        self._keep(file)

    def _keep(self, file: Path) -> None:
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # kept already, or gone
            os.link(file, self.folder / f"{file.parent.name}+{file.name}")

    def stop(self) -> list[Path]:
        self._stop.set()
        self._thread.join()
        return sorted(self.folder.iterdir())


def start_job(folder: Path, model: Path, *args: str, max_steps: int = 3) -> Job:
    """Start `moorage rl` on a small job in `folder`."""
    toml = folder / "job.toml"
    toml.write_text(TOML.format(max_steps=max_steps, model=model))
    command = [sys.executable, "-m", "moorage.cli.main", "rl", "@", str(toml), *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True
    )
    return Job(RunDir(folder / "runs" / "job"), process)


def run_job(folder: Path, model: Path, *args: str, max_steps: int = 3) -> Job:
    """Run a small job to its end, which must be a good one."""
    job = start_job(folder, model, *args, max_steps=max_steps)
    try:
        code, out, err = job.finish(180.0)
    finally:
        job.end()
    assert code == 0, f"{out}\n{err}"
    return job


def started_by(launcher_pid: int) -> list[psutil.Process]:
    """Living processes whose environment names this launcher."""
    found = []
    for process in psutil.process_iter():
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if not zombie and process.environ().get("MOORAGE_PARENT_PID") == str(launcher_pid):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]


def wait_until(condition: Callable[[], Any], timeout_s: float) -> None:
    """Poll until `condition()` holds; an assertion fails when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)
