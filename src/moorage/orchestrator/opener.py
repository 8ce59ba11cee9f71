"""Opens groups: takes the task that is next and makes the record of what is owed for it.

A task comes from what an earlier attempt left open, else from an eval pass or the train pick, sampled once
from the source's env server. Promises:

- a stream's cursor is remembered with the group that its task opened, so a resume neither skips nor repeats;
- a train task that cannot be sampled costs nothing: nothing was started, and its stream has not moved;
- each group of an eval pass has the task of its position, also after failures; a position whose task cannot
  be had is tried again, at most `retries` times, then reported (`on_failed`): its pass is measured whole;
- a server that gives no task `MAX_FAILURES` times in a row is an error.

Does not know permits, or who runs the episodes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.orchestrator.environments import Cursors, EnvClients, Environment, Limits
from moorage.orchestrator.groups import Group, Groups, Split
from moorage.orchestrator.policy import Policy
from moorage.orchestrator.sources import EvalPass, EvalSlots, TrainPicker

log = get_logger(__name__)

MAX_FAILURES = 10


class Opener:
    """Of one dispatcher, on its loop."""

    def __init__(
        self,
        environments: Mapping[Split, Mapping[str, Environment]],
        groups: Groups,
        policy: Policy,
        limits: Limits,
        *,
        picker: TrainPicker | None,
        window: Callable[[], int],
        make_id: Callable[[], str],
        on_open: Callable[[str, str, dict[str, Any]], None],
        on_failed: Callable[[Group, str], None],
    ) -> None:
        """As for the dispatcher. `on_failed(group, reason)`: none of the group's episodes can be started."""
        self.picker = picker
        self.slots = EvalSlots()
        self.cursors = Cursors()
        self.training = picker is not None
        self.asks = ""
        """Whom it waits for, empty while it does not."""
        self._environments = environments
        self._groups = groups
        self._policy = policy
        self._limits = limits
        self._window = window
        self._make_id = make_id
        self._on_open = on_open
        self._on_failed = on_failed
        self._requeued: deque[tuple[str, dict[str, Any]]] = deque()
        self._failures: dict[str, int] = {}
        self._rests_until = 0.0

    def requeue(self, tasks: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Tasks (source, task) of an earlier attempt, served before anything is sampled."""
        self._requeued.extend(tasks)

    @property
    def requeued_tasks(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Those that are not served yet."""
        return tuple(self._requeued)

    @property
    def num_picked(self) -> int:
        return self.picker.num_picked if self.picker else 0

    @property
    def rests(self) -> bool:
        """Whether it lets an env server rest that could not give a task."""
        return time.monotonic() < self._rests_until

    def end_training(self) -> None:
        """Open no more train groups."""
        self.training = False
        self._requeued.clear()

    def cost(self, split: Split) -> int:
        """Permits to ask for before a task is sampled: one, or a whole group when every source needs it."""
        costs = [
            each.source.group_size if each.scores_groups else 1 for each in self._environments[split].values()
        ]
        return max(costs, default=1)

    async def open(self, split: Split) -> Group | None:
        """Sample a task and open its group. None when there is none to open now; the caller looks again."""
        if split == "eval":
            chosen = self.slots.next()
            return None if chosen is None or self.rests else await self._open_eval(chosen)
        if self._requeued:
            name, task = self._requeued.popleft()
            return self._open_train(self._environments["train"][name], task)
        return None if self.rests else await self._sample_train()

    async def _sample_train(self) -> Group | None:
        assert self.picker is not None
        environment = self._environments["train"][self.picker.pick()]
        stream = environment.source.stream
        try:
            with self._asking(stream):
                sampled = await environment.client.sample(stream)
        except EnvServerError as error:
            self._note_failure(environment, error)
            return None
        self._failures.pop(environment.source.name, None)
        if not self.training:
            return None  # the last batch shipped while this task was sampled
        self.cursors.advance(stream, sampled.epoch, sampled.position)
        return self._open_train(environment, sampled.task)

    async def _open_eval(self, chosen: EvalPass) -> Group | None:
        environment = self._environments["eval"][chosen.source.name]
        try:
            with self._asking(chosen.stream):
                task = await sample_at(environment.client, chosen)
        except EnvServerError as error:
            chosen.failures += 1
            self._note_failure(environment, error)
            if chosen.failures <= self._limits.retries:
                return None
            group = self._open_next(environment, {}, chosen)
            self._on_failed(group, str(error))
            return None
        self._failures.pop(environment.source.name, None)
        return self._open_next(environment, task, chosen)

    @contextlib.contextmanager
    def _asking(self, stream: str) -> Iterator[None]:
        self.asks = f"{stream}: its env server to sample a task"
        try:
            yield
        finally:
            self.asks = ""

    def _open_train(self, environment: Environment, task: dict[str, Any]) -> Group:
        deadline_at = time.monotonic() + self._limits.group_deadline_s
        size = environment.source.group_size
        group = self._open(environment, self._make_id(), task, self._window(), size, deadline_at)
        self._on_open(group.id, group.source, task)
        return group

    def _open_next(self, environment: Environment, task: dict[str, Any], chosen: EvalPass) -> Group:
        """The group of the pass's next position; it has no deadline: it ends because each of its runs has."""
        group = self._open(environment, chosen.group_id, task, chosen.version, chosen.num_missing, math.inf)
        self.slots.opened()
        return group

    def _open(
        self,
        environment: Environment,
        group_id: str,
        task: dict[str, Any],
        step: int,
        size: int,
        deadline_at: float,
    ) -> Group:
        source = environment.source
        group = Group(
            id=group_id,
            split=source.split,
            source=source.name,
            task=task,
            step=step,
            version=self._policy.version,
            size=size,
            indivisible=environment.scores_groups,
            opened_at=time.monotonic(),
            deadline_at=deadline_at,
        )
        return self._groups.open(group)

    def _note_failure(self, environment: Environment, error: EnvServerError) -> None:
        """Let the server rest. Raises EnvServerError after too many failures in a row."""
        name = environment.source.name
        self._failures[name] = failures = self._failures.get(name, 0) + 1
        self._rests_until = time.monotonic() + self._limits.sample_retry_s
        log.warning("%s: no task (%d in a row): %s", name, failures, error)
        if failures >= MAX_FAILURES:
            raise EnvServerError(
                error.kind, f"env server of `{name}` gave no task {failures} times in a row; last: {error}"
            )


async def sample_at(client: EnvClients, chosen: EvalPass) -> dict[str, Any]:
    """The task at the next position of a pass, wherever the stream stood. Raises EnvServerError."""
    at, cursor, chosen.cursor = chosen.position, chosen.cursor, None  # not known until it has answered
    if cursor != at:
        await client.restore(chosen.stream, 0, at, chosen.num_tasks)
    sampled = await client.sample(chosen.stream, chosen.num_tasks)
    if (sampled.epoch, sampled.position) != (0, at + 1):
        raise EnvServerError(
            "task_error",
            f"stream {chosen.stream} gave the task before epoch {sampled.epoch}, position "
            f"{sampled.position} where that at position {at} was asked for; does somebody else read it?",
        )
    chosen.cursor = at + 1
    return sampled.task
