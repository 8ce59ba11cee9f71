"""Child processes of the launcher, each in a session of its own with one log file.

Promises:
- a child's environment names the launcher (`MOORAGE_PARENT_PID`), so that it can notice its parent's death,
  and the secret (`MOORAGE_TOKEN`);
- it also has a mark that no other child has (`MOORAGE_CHILD`): by it, `kill_everything` finds what the child
  started, whatever the session, and nothing else. The secret is no mark: an external env server has it too;
- `stop` asks with SIGTERM, waits, then kills the whole session;
- after `kill_everything` nothing that was started here runs.

Children are started from the main thread only: the kernel's death signal follows the thread that forked.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from moorage.core.parent import PARENT_VARIABLE
from moorage.core.secret import TOKEN_VARIABLE
from moorage.launcher.plan import ProcessRecord

MARK_VARIABLE = "MOORAGE_CHILD"
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
TAIL_BYTES = 16_384
_LOG_HEAD = re.compile(r"^\d\d:\d\d:\d\d [A-Z] \S+ \S+: ")
_ERROR_MARKS = ("moorage: error:", " E ", "Error:", "Error ", "Exception")


class Child:
    """A running process of a record. `mark` is in the environment of it and of all that it starts."""

    def __init__(self, record: ProcessRecord, popen: subprocess.Popen[bytes], mark: str) -> None:
        self.record = record
        self.popen = popen
        self.mark = mark

    @property
    def pid(self) -> int:
        """Also the id of its session and process group."""
        return self.popen.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self.popen.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process itself."""
        if self.poll() is None:
            self.popen.send_signal(number)

    def kill_session(self) -> None:
        """SIGKILL to every process of its session."""
        for pid in _pids():
            if _session(pid) == self.pid:
                _kill(pid)


def start(record: ProcessRecord, token: str) -> Child:
    """Start a record's command line; its output is appended to its log file."""
    record.log.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(16)
    env = {**os.environ, **DEFAULTS, **record.env}
    env |= {TOKEN_VARIABLE: token, PARENT_VARIABLE: str(os.getpid()), MARK_VARIABLE: mark}
    with open(record.log, "ab") as log:
        popen = subprocess.Popen(
            record.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    return Child(record, popen, mark)


def stop(children: Iterable[Child], timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to each, then SIGKILL to their sessions: after `timeout_s`, or as soon as `hurry()`."""
    children = list(children)
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline and not hurry():
        time.sleep(0.02)
    for child in children:
        child.kill_session()
        child.popen.wait()


def kill_everything(children: Iterable[Child], timeout_s: float = 5.0) -> list[int]:
    """SIGKILL to all that is left of these children. Returns the process ids that live after `timeout_s`."""
    children = list(children)
    sessions, marks = {child.pid for child in children}, {child.mark for child in children}
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in _pids() if pid != os.getpid() and _belongs(pid, sessions, marks)]
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            _kill(pid)
        time.sleep(0.05)


def resident_mib(children: Iterable[Child], own_kind: str) -> dict[str, float]:
    """Resident memory per kind of process, everything in their sessions included, in MiB.

    `own_kind`: the name under which this process itself is listed.
    """
    kinds = {child.pid: child.record.kind for child in children}
    sums: dict[str, float] = {own_kind: _resident_mib(os.getpid()), **dict.fromkeys(kinds.values(), 0.0)}
    for pid in _pids():
        kind = kinds.get(_session(pid) or 0)
        if kind is not None:
            sums[kind] += _resident_mib(pid)
    return sums


def last_error(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log."""
    lines = _tail(log)
    return "\n".join(lines[-num_lines:]) if lines else f"({log} is empty)"


def error_line(log: Path) -> str:
    """The one line of a log's end that says best what went wrong; empty when there is none."""
    lines = [line.strip() for line in _tail(log) if line.strip()]
    marked = [line for line in lines if any(mark in line for mark in _ERROR_MARKS)]
    return _LOG_HEAD.sub("", (marked or lines or [""])[-1])


def _tail(log: Path) -> list[str]:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").rstrip().splitlines()
    except FileNotFoundError:
        return []


def _pids() -> list[int]:
    return psutil.pids()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        os.kill(pid, signal.SIGKILL)


def _belongs(pid: int, sessions: set[int], marks: set[str]) -> bool:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return _session(pid) in sessions or process.environ().get(MARK_VARIABLE) in marks
    except (psutil.Error, OSError):
        return False


def _resident_mib(pid: int) -> float:
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.Error:
        return 0.0
