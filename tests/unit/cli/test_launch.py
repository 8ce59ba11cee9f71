"""How `moorage rl` ends a run when nobody reads its output, and when it fails itself."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.core.rundir import RunDir, read_json

LAUNCH = """
import sys
from moorage.cli.rl import launch
from moorage.core.rundir import RunDir
from moorage.launcher.plan import Plan, ProcessRecord
run = RunDir(sys.argv[1])
argv = (sys.executable, "-c", sys.argv[2])
records = [
    ProcessRecord(name, name, argv, run.log(name), ends_well=True) for name in ("orchestrator", "trainer")
]
sys.exit(launch(Plan(run, "a" * 32, 1, 3, tuple(records), {}), "job", "secret"))
"""


@contextmanager
def start_launch(run: RunDir, seconds: float, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose orchestrator and trainer end well after `seconds`."""
    command = [sys.executable, "-c", LAUNCH, str(run), f"import time; time.sleep({seconds})"]
    with subprocess.Popen(command, **more) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()  # its children end with it (R35)


def wait_for_start(run: RunDir) -> None:
    deadline = time.monotonic() + 30
    while not run.log("trainer").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_whose_reader_has_left_ends_well_and_leaves_its_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with start_launch(run, 0.5, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()  # as `| head -1` does
        launcher.stdout.close()
        assert launcher.stderr is not None
        errors = launcher.stderr.read()
        assert launcher.wait(30) == 0, errors
    assert errors == b""
    assert read_json(run.summary)["status"] == "finished"


@pytest.mark.usefixtures("hang_ups_are_heard")
def test_a_closed_terminal_cancels_the_run_and_leaves_its_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    leader, follower = pty.openpty()
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    with start_launch(run, 60.0, start_new_session=True, **streams) as launcher:
        os.close(follower)
        wait_for_start(run)
        os.close(leader)
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(30) == 129
    summary = read_json(run.summary)
    assert (summary["status"], summary["error"]) == ("cancelled", "stopped by SIGHUP")
    assert read_json(run.end)["status"] == "cancelled"


def test_a_launcher_that_fails_itself_leaves_its_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.logs.write_text("a file stands where the folder of the logs should be")
    with start_launch(run, 60.0, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
        _, errors = launcher.communicate(timeout=30)
        assert launcher.returncode == 1
    assert b"FileExistsError" in errors
    assert read_json(run.summary)["status"] == "failed"
    assert read_json(run.summary)["error"] == "the launcher failed"
