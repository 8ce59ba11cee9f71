"""A child ends when its parent is gone: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moorage.core.parent import PARENT_VARIABLE, process_birth, watch_parent

# A "launcher" that starts a child and waits. The child writes its pid, watches, and notes SIGTERM.
LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "MOORAGE_PARENT_PID": str(os.getpid())}
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=env, start_new_session=True)
"""
CHILD = """
import os, signal, sys, time
from moorage.core.parent import watch_parent
folder = sys.argv[1]
def note(*_):
    open(folder + "/terminated", "w").close()
    if {orderly}: raise SystemExit(0)
signal.signal(signal.SIGTERM, note)
watch_parent(poll_s=0.1, grace_s=0.5)
open(folder + "/pid.tmp", "w").write(str(os.getpid()))
os.rename(folder + "/pid.tmp", folder + "/pid")
while True: time.sleep(0.05)
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_child(folder: Path, *, orderly: bool) -> tuple[subprocess.Popen[bytes], int]:
    code = CHILD.replace("{orderly}", str(orderly))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, code, str(folder)])
    wait_until(lambda: (folder / "pid").exists())
    return launcher, int((folder / "pid").read_text())


@pytest.mark.parametrize("orderly", [True, False])
def test_a_child_ends_when_its_launcher_is_killed(tmp_path: Path, orderly: bool) -> None:
    launcher, pid = start_child(tmp_path, orderly=orderly)
    assert process_birth(pid) is not None
    launcher.kill()
    launcher.wait()
    wait_until(lambda: process_birth(pid) is None)
    assert (tmp_path / "terminated").exists()


def test_a_grandchild_of_a_killed_launcher_ends_too(tmp_path: Path) -> None:
    code = CHILD.replace("{orderly}", "True")
    middle = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    launcher_code = LAUNCHER.replace("sys.argv[2]]", "sys.argv[2], sys.argv[3]]")
    launcher = subprocess.Popen([sys.executable, "-c", launcher_code, middle, str(tmp_path), code])
    wait_until(lambda: (tmp_path / "pid").exists())
    pid = int((tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    wait_until(lambda: process_birth(pid) is None)


def test_a_process_started_by_hand_watches_nobody() -> None:
    assert PARENT_VARIABLE not in os.environ
    assert watch_parent() is None


def test_a_zombie_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        wait_until(lambda: process_birth(child.pid) is None)
    finally:
        child.wait()
    assert process_birth(os.getpid()) is not None
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
