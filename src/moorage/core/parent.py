"""A child process notices that its parent is gone, and ends (R35).

Promises:
- `watch_parent()` does nothing in a process that was started by hand (no `MOORAGE_PARENT_PID`);
- when the launcher named there, or the direct parent, is gone, the process gets SIGTERM (its own orderly
  stop); if it still lives `GRACE_S` later it is ended by `os._exit`;
- on Linux the kernel sends that SIGTERM at once (`PR_SET_PDEATHSIG`). The polling thread is what decides: the
  kernel's signal knows the direct parent only, and is lost when it came before this process asked for it.

A process id alone is not trusted: a zombie counts as gone, and so does an id that another process got since.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

PARENT_VARIABLE = "MOORAGE_PARENT_PID"
POLL_S = 1.0
GRACE_S = 10.0
EXIT_CODE = 70
_PR_SET_PDEATHSIG = 1


def watch_parent(
    parent_pid: int | None = None, *, poll_s: float = POLL_S, grace_s: float = GRACE_S
) -> threading.Thread | None:
    """Start watching, and return the watching thread, or None when there is nobody to watch.

    `parent_pid`: a process other than the launcher to watch (the broker, for its workers). Call it early in a
    process's `main`, from the main thread.
    """
    named = os.environ.get(PARENT_VARIABLE)
    pids = {int(pid) for pid in (named, parent_pid) if pid is not None}
    if not pids:
        return None
    _ask_kernel()
    births = {pid: process_birth(pid) for pid in pids}
    direct = os.getppid()
    orphan = direct == 1 and 1 not in pids  # the direct parent died before we could look

    def watch() -> None:
        while not orphan and os.getppid() == direct and all(_lives(pid, births[pid]) for pid in pids):
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(EXIT_CODE)

    thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
    thread.start()
    return thread


def process_birth(pid: int) -> str | None:
    """What tells a process apart from a later one with the same id; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "" if not Path("/proc/self").exists() and _signalable(pid) else None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


def _lives(pid: int, birth: str | None) -> bool:
    return birth is not None and process_birth(pid) == birth


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ask_kernel() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
