"""Supervised asyncio tasks: every task has an owner that awaits it, and no failure is silent.

`TaskOwner` is the one way this project starts background tasks. Promises:

- the first background task that fails (or that ends although it was said to run for ever) sets `failure`
  and wakes `wait_failed()`; the owner of the owner decides what that means;
- `close()` cancels and awaits everything it started, in reverse order of start;
- a task that was cancelled on purpose is no failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


class TaskOwner:
    """Starts, watches and ends background tasks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], bool] = {}
        self._closing = False

    def start(self, coro: Coroutine[Any, Any, Any], name: str, *, forever: bool = False) -> asyncio.Task[Any]:
        """Run `coro` as a task of this owner. `forever`: its plain return is a failure too."""
        task = asyncio.create_task(coro, name=f"{self.name}/{name}")
        self._tasks[task] = forever
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        forever = self._tasks.pop(task, False)
        if task.cancelled() or self._closing:
            if not task.cancelled():
                task.exception()  # retrieved: nobody else will
            return
        error = task.exception()
        if error is None and forever:
            error = RuntimeError(f"{task.get_name()} ended although it should run until it is stopped")
        if error is not None and self.failure is None:
            self.failure = error
            self._failed.set()

    async def wait_failed(self) -> BaseException:
        """Return the first failure. Unblocked by a failing task; cancelled by whoever waits."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel and await all tasks. Safe to call twice."""
        self._closing = True
        for task in reversed(list(self._tasks)):
            task.cancel()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> TaskOwner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended, whatever its ending."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
