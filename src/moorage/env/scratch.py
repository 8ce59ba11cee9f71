"""Working folders of rollouts that run in this process, kept in memory while nothing is written to them.

verifiers makes a folder for each rollout below the home folder's cache and removes it after. On a disk that
is a tenth of the CPU of a short rollout, it blocks the event loop for milliseconds when the disk is busy, and
a killed worker leaves its folders behind. Agents that execute no code write nothing there, so for them the
folders go to tmpfs, below one folder per process, and an empty one is removed with one system call instead of
on a thread.

Promises: the folder is removed at the end; those that killed processes left are removed by the next one that
starts. Does not know: rollouts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime
from verifiers.v1.runtimes import subprocess as runtimes
from verifiers.v1.utils import loaders

PREFIX = "moorage-scratch-"
TMPFS = Path("/dev/shm")


@contextmanager
def scratch(env: vf.Env, root: Path | None = None) -> Iterator[Path | None]:
    """While entered, subprocess runtimes of an env without code-executing agents work below `root` (tmpfs).

    Yields the folder; None for an env whose agents execute code, which keep verifiers' own place.
    """
    if any(map(_writes, agent_config_fields(env.config).values(), env.config.agent_harnesses().values())):
        yield None
        return
    root = root or (TMPFS if os.access(TMPFS, os.W_OK) else Path(tempfile.gettempdir()))
    remove_leftovers(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
    before = runtimes.CACHE_DIR, SubprocessRuntime.teardown
    runtimes.CACHE_DIR, SubprocessRuntime.teardown = folder, _teardown(SubprocessRuntime.teardown)
    try:
        yield folder
    finally:
        runtimes.CACHE_DIR, SubprocessRuntime.teardown = before
        shutil.rmtree(folder, ignore_errors=True)


def _teardown(thorough: Callable[[SubprocessRuntime], Awaitable[None]]) -> Any:
    """`thorough`, spared where nothing ran and nothing was written."""

    async def teardown(self: SubprocessRuntime) -> None:
        if not self._background and self.workdir is not None:
            with contextlib.suppress(OSError):  # not empty
                self.workdir.rmdir()
                return
        await thorough(self)

    return teardown


def remove_leftovers(root: Path) -> None:
    """Remove the folders of processes that are gone."""
    for folder in root.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _writes(agent: vf.AgentConfig, harness: vf.HarnessConfig) -> bool:
    cls = loaders.harness_class(harness.id)
    return cls.EXECUTES_CODE or cls.NEEDS_CONTAINER or not isinstance(agent.runtime, SubprocessConfig)
