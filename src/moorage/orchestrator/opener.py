"""Opens groups: takes the task that is next and makes the record of what is owed for it.

A task comes from what an earlier attempt left open, else from an eval pass or the train pick, sampled once
from the source's env server. Promises:

- a stream's cursor is remembered with the group that its task opened, so a resume neither skips nor repeats;
- a train task that cannot be sampled costs nothing: nothing was started, and its stream has not moved;
- an eval slot that cannot be sampled is reported (`on_failed`), so that its pass is measured whole;
- a server that gives no task `MAX_FAILURES` times in a row is an error.

Does not know permits, or who runs the episodes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moorage.core.errors import EnvServerError
from moorage.core.log import get_logger
from moorage.orchestrator.environments import Cursors, Environment, Limits
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
        if split == "train" and self._requeued:
            name, task = self._requeued.popleft()
            return self._open(self._environments["train"][name], task, None)
        if self.rests:
            return None
        chosen = self.slots.take() if split == "eval" else None
        name = chosen.source.name if chosen else self._pick()
        environment = self._environments[split][name]
        stream = chosen.stream if chosen else environment.source.stream
        self.asks = f"{stream}: its env server to sample a task"
        try:
            sampled = await environment.client.sample(stream, chosen.num_tasks if chosen else None)
        except EnvServerError as error:
            self._on_sample_failed(environment, chosen, error)
            return None
        finally:
            self.asks = ""
        self._failures[name] = 0
        if chosen is None:
            if not self.training:
                return None  # the last batch shipped while this task was sampled
            self.cursors.advance(stream, sampled.epoch, sampled.position)
        elif not chosen.missing(chosen.num_opened - 1):
            return None  # measured already: only the stream had to move on
        return self._open(environment, sampled.task, chosen)

    def _pick(self) -> str:
        assert self.picker is not None
        return self.picker.pick()

    def _open(self, environment: Environment, task: dict[str, Any], chosen: EvalPass | None) -> Group:
        now = time.monotonic()
        source = environment.source
        group = Group(
            id=chosen.group_id(chosen.num_opened - 1) if chosen else self._make_id(),
            split=source.split,
            source=source.name,
            task=task,
            step=chosen.version if chosen else self._window(),
            version=self._policy.version,
            size=chosen.missing(chosen.num_opened - 1) if chosen else source.group_size,
            indivisible=environment.scores_groups,
            opened_at=now,
            deadline_at=math.inf if chosen else now + self._limits.group_deadline_s,
        )
        if group.split == "train":
            self._on_open(group.id, group.source, task)
        return self._groups.open(group)

    def _on_sample_failed(
        self, environment: Environment, chosen: EvalPass | None, error: EnvServerError
    ) -> None:
        name = environment.source.name
        self._failures[name] = failures = self._failures.get(name, 0) + 1
        self._rests_until = time.monotonic() + self._limits.sample_retry_s
        log.warning("%s: no task (%d in a row): %s", name, failures, error)
        if failures >= MAX_FAILURES:
            raise EnvServerError(
                error.kind, f"env server of `{name}` gave no task {failures} times in a row; last: {error}"
            )
        if chosen is not None:
            self._on_failed(self._open(environment, {}, chosen), str(error))
