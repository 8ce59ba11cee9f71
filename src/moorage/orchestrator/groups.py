"""Groups in flight: which episodes of which task are still owed, running, or done. Pure.

A group is n episodes of one task. Its episodes are dispatched one by one, or all as one work when the
environment scores groups. `Groups` promises:

- every episode of a group ends once: emitted by `finish`, or counted in the one `Cancellation` of the group;
- after `drop` nothing of the group is known any more: a work that comes back later finds None;
- a work lost to an infrastructure failure is owed again at most `retries` times;
- a group is forgotten when its last episode has been emitted.

Does not know time (it is told), permits, tasks in the asyncio sense, or what an episode holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]
Reason = Literal["stale", "overload", "deadline", "shutdown"]


@dataclass(frozen=True)
class Work:
    """One dispatch: `num_episodes` episodes of a group in one call. `attempt` counts from 0."""

    id: int
    group_id: str
    num_episodes: int
    attempt: int


@dataclass(frozen=True)
class Cancellation:
    """A group that was dropped: `count` episodes will not arrive. `num_started` of them had begun (and may
    have been waiting for a retry), `num_running` were running."""

    group: Group
    reason: Reason
    count: int
    num_started: int
    num_running: int
    works: tuple[Work, ...]


@dataclass
class Group:
    """`size` episodes of `task`.

    `step`: the window that was collecting when a train group opened; the version measured, for eval.
    `version`: the live policy version when it opened, None for a frozen sampler.
    """

    id: str
    split: Split
    source: str
    task: dict[str, Any]
    step: int
    version: int | None
    size: int
    indivisible: bool
    opened_at: float
    deadline_at: float
    started: int = 0
    emitted: int = 0
    owed: deque[int] = field(default_factory=deque)
    running: dict[int, Work] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return sum(work.num_episodes for work in self.running.values())

    @property
    def cost(self) -> int:
        """Permits that its next work takes."""
        return self.size if self.indivisible else 1


class Groups:
    """All open groups, oldest first."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self._groups: dict[str, Group] = {}
        self._work_group: dict[int, str] = {}
        self._unscheduled: dict[Split, dict[str, None]] = {"train": {}, "eval": {}}
        self._next_work = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def open(self, group: Group) -> Group:
        """Add a group that owes all its episodes."""
        if group.id in self._groups:
            raise ValueError(f"group {group.id} is open already")
        group.owed = deque([0] if group.indivisible else [0] * group.size)
        self._groups[group.id] = group
        self._unscheduled[group.split][group.id] = None
        return group

    def first_unscheduled(self, split: Split) -> Group | None:
        """The oldest group of `split` that owes a dispatch (its siblings' prefix is still warm)."""
        group_id = next(iter(self._unscheduled[split]), None)
        return None if group_id is None else self._groups[group_id]

    def dispatch(self, group: Group) -> Work:
        """The group's next work, now running."""
        attempt = group.owed.popleft()
        work = Work(self._next_work, group.id, group.size if group.indivisible else 1, attempt)
        self._next_work += 1
        if attempt == 0:
            group.started += work.num_episodes
        group.running[work.id] = work
        self._work_group[work.id] = group.id
        if not group.owed:
            del self._unscheduled[group.split][group.id]
        return work

    def finish(self, work: Work) -> Group | None:
        """The work's episodes are final. Returns its group, or None when the group was dropped."""
        group = self._take(work)
        if group is None:
            return None
        group.emitted += work.num_episodes
        if group.emitted >= group.size:
            del self._groups[group.id]
        return group

    def retry(self, work: Work) -> bool:
        """Owe the work's episodes again. False when it was dropped or its retries are used up."""
        group = self._groups.get(self._work_group.get(work.id, ""))
        if group is None or work.attempt >= self.retries:
            return False
        self._take(work)
        group.owed.append(work.attempt + 1)
        self._unscheduled[group.split][group.id] = None
        return True

    def drop(self, group_id: str, reason: Reason) -> Cancellation | None:
        """Forget a group. None when it is not open."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return None
        works = tuple(group.running.values())
        for work in works:
            del self._work_group[work.id]
        self._unscheduled[group.split].pop(group_id, None)
        cancellation = Cancellation(
            group,
            reason,
            count=group.size - group.emitted,
            num_started=group.started - group.emitted,
            num_running=group.num_running,
            works=works,
        )
        group.running.clear()
        group.owed.clear()
        return cancellation

    def stale(self, min_fresh: int) -> list[str]:
        """Train groups of the live policy that opened before version `min_fresh`."""
        return [
            group.id
            for group in self._groups.values()
            if group.split == "train" and group.version is not None and group.version < min_fresh
        ]

    def expired(self, now: float) -> list[str]:
        """Groups past their deadline."""
        return [group.id for group in self._groups.values() if now >= group.deadline_at]

    def youngest(self, num_running: int) -> list[str]:
        """The youngest train groups that together have at least `num_running` episodes running."""
        chosen: list[str] = []
        for group in reversed(self._groups.values()):
            if num_running <= 0:
                break
            if group.split == "train" and group.running:
                chosen.append(group.id)
                num_running -= group.num_running
        return chosen

    def in_flight(self, split: Split) -> int:
        """Episodes running."""
        return sum(group.num_running for group in self._groups.values() if group.split == split)

    def _take(self, work: Work) -> Group | None:
        group = self._groups.get(self._work_group.pop(work.id, ""))
        if group is not None:
            del group.running[work.id]
        return group
