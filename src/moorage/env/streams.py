"""Streams: in which order a source's tasks are served (R22, R25, R26). Pure.

A stream is a named cursor (`<split>/<source>[@step]`) over one taskset. Promises:

- finite and shuffled: epoch e is a permutation of all tasks, seeded by (seed, e); every epoch has every task
  once, and the same seed gives the same orders on every machine;
- finite and in order: load order, which wraps into the next epoch;
- infinite: one task after another from the taskset's own iterator, never a list;
- with a limit, only the first so many tasks of epoch 0's order exist, and epochs go over these;
- the cursor that comes with a task is the one behind it: `restore` with it continues after that task.

It does not know who asks, nor what a task is.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.core.errors import ConfigError, EnvServerError


@dataclass(frozen=True)
class Served:
    """One task, and the cursor behind it."""

    task: Any
    epoch: int
    position: int


def permutation(seed: int, epoch: int, count: int) -> Sequence[int]:
    """The order of `count` tasks in `epoch`: the same for the same arguments, on every machine."""
    order = array("l", range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class FiniteStream:
    """A cursor over a list. `seed` None serves in order; `limit` cuts the list after epoch 0's order."""

    def __init__(self, tasks: Sequence[Any], seed: int | None, limit: int | None = None) -> None:
        if not tasks:
            raise EnvServerError("refused", "the taskset is empty: there is nothing to sample")
        self.tasks = tasks
        self.seed = seed
        self.limit = limit
        self.count = len(tasks) if limit is None else min(limit, len(tasks))
        self.epoch = 0
        self.position = 0
        self._chosen = self._order(0, len(tasks))[: self.count]
        self._current: Sequence[int] = self._chosen

    def _order(self, epoch: int, count: int) -> Sequence[int]:
        return range(count) if self.seed is None else permutation(self.seed, epoch, count)

    def _set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        if self.seed is None or epoch == 0:
            self._current = self._chosen
        elif self.count == len(self.tasks):
            self._current = self._order(epoch, self.count)
        else:
            self._current = [self._chosen[i] for i in self._order(epoch, self.count)]

    def next(self) -> Served:
        """Serve one task and move on."""
        if self.position >= self.count:
            self._set_epoch(self.epoch + 1)
            self.position = 0
        index = self._current[self.position]
        self.position += 1
        return Served(self.tasks[index], self.epoch, self.position)

    def restore(self, epoch: int, position: int) -> None:
        """Make the next task the one behind this cursor."""
        _check_cursor(epoch, position, self.count)
        self._set_epoch(epoch)
        self.position = position


class InfiniteStream:
    """A cursor over an endless iterator; with a limit it starts again after that many tasks."""

    def __init__(self, load: Callable[[], Iterator[Any]], limit: int | None = None) -> None:
        self.load = load
        self.limit = limit
        self.epoch = 0
        self.position = 0
        self._tasks = load()

    def next(self) -> Served:
        """Serve one task and move on. Raises EnvServerError when the taskset ends against its word."""
        if self.limit is not None and self.position >= self.limit:
            self._rewind(self.epoch + 1)
        try:
            task = next(self._tasks)
        except StopIteration:
            raise EnvServerError(
                "refused",
                f"the taskset says INFINITE = True but ended after {self.position} tasks; "
                "set INFINITE = False or make load() endless",
            ) from None
        self.position += 1
        return Served(task, self.epoch, self.position)

    def restore(self, epoch: int, position: int) -> None:
        """Read forward from the start to this cursor."""
        _check_cursor(epoch, position, self.limit)
        if position < self.position or epoch != self.epoch:
            self._rewind(epoch)
        while self.position < position:
            self.next()

    def _rewind(self, epoch: int) -> None:
        self._tasks = self.load()
        self.epoch, self.position = epoch, 0


class Streams:
    """All streams of one taskset, by name."""

    def __init__(
        self,
        load: Callable[[], Iterator[Any]],
        *,
        infinite: bool,
        seed: int | None,
    ) -> None:
        if infinite and seed is not None:
            raise ConfigError(
                f"taskset.shuffle (seed {seed}): an infinite taskset has no end to shuffle; write "
                "`shuffle = false` in the taskset block, or draw at random inside load()"
            )
        self.infinite = infinite
        self.seed = seed
        self._load = load
        self._tasks: list[Any] = [] if infinite else list(load())
        self._open: dict[str, FiniteStream | InfiniteStream] = {}

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None for an infinite taskset."""
        return None if self.infinite else len(self._tasks)

    def __len__(self) -> int:
        return len(self._open)

    def peek(self, count: int) -> list[Any]:
        """The first tasks in load order, without moving any cursor."""
        return list(itertools.islice(self._load() if self.infinite else iter(self._tasks), count))

    def sample(self, name: str, limit: int | None = None) -> Served:
        """The next task of stream `name`, created on first use."""
        return self._stream(name, limit).next()

    def restore(self, name: str, epoch: int, position: int, limit: int | None = None) -> None:
        """Set the cursor of stream `name`, created if need be."""
        self._stream(name, limit).restore(epoch, position)

    def close(self, name: str) -> None:
        """Forget stream `name`; unknown names are fine."""
        self._open.pop(name, None)

    def close_all(self) -> None:
        """Forget all streams."""
        self._open.clear()

    def cursor(self, name: str) -> tuple[int, int] | None:
        """(epoch, position) behind the last task served, None for a stream not open."""
        stream = self._open.get(name)
        return None if stream is None else (stream.epoch, stream.position)

    def _stream(self, name: str, limit: int | None) -> FiniteStream | InfiniteStream:
        if limit is not None and limit < 1:
            raise EnvServerError("bad_request", f"limit {limit}: at least 1, or none")
        stream = self._open.get(name)
        if stream is None:
            stream = (
                InfiniteStream(self._load, limit)
                if self.infinite
                else FiniteStream(self._tasks, self.seed, limit)
            )
            self._open[name] = stream
        elif limit != stream.limit:
            raise EnvServerError(
                "bad_request",
                f"stream {name!r} was opened with limit {stream.limit}, not {limit}; "
                "close it first or use another name",
            )
        return stream


def _check_cursor(epoch: int, position: int, count: int | None) -> None:
    if epoch < 0 or position < 0 or (count is not None and position > count):
        raise EnvServerError(
            "bad_request",
            f"no such cursor: epoch {epoch}, position {position} (of {count or 'endless'} tasks)",
        )
