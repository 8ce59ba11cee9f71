"""A scenario for a user simulator: the assistant learns the wish only by talking."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ErrandsTaskset"]


class ErrandData(vf.TaskData):
    wish: str


class ErrandTask(vf.Task[ErrandData]):
    @vf.reward
    async def granted(self, task: ErrandData, trace: vf.Trace) -> float:
        return float(any(task.wish in (message.content or "") for message in trace.assistant_messages))


class ErrandsTaskset(vf.Taskset[ErrandTask]):
    DEFAULT_HARNESS = "moorage.env.direct"

    def load(self) -> Iterable[ErrandTask]:
        for wish in ("tea", "bread"):
            yield ErrandTask(ErrandData(prompt=f"You want {wish}.", wish=wish), self.config.task)
