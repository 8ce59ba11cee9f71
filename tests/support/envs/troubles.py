"""Environments that go wrong in the way that their task names.

`action`: `fine`; `raise` and `raise_late` (the env's `run` fails before and after the agent played); `reward`
(scoring fails); `finalize`; `slow` (plays, then sleeps); `flaky` (`run` fails at the first two attempts of a
process); `scribble` (scoring writes into the task's data, and says how much is written there).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["TroublesEnv", "TroublesTaskset"]

ACTIONS = ("fine", "raise", "raise_late", "reward", "finalize", "slow", "flaky", "scribble")
attempts: Counter[str] = Counter()


class TroubleData(vf.TaskData):
    action: str = "fine"
    notes: list[str] = Field(default_factory=list)


class TroubleTask(vf.Task[TroubleData]):
    @vf.reward
    async def one(self, task: TroubleData) -> float:
        if task.action == "reward":
            raise ValueError("this reward cannot be computed")
        if task.action == "scribble":
            task.notes.append("scored")
            return float(len(task.notes))
        return 1.0


class TroublesTaskset(vf.Taskset[TroubleTask]):
    DEFAULT_HARNESS = "moorage.env.direct"

    def load(self) -> Iterable[TroubleTask]:
        for action in ACTIONS:
            yield TroubleTask(TroubleData(prompt=action, action=action), self.config.task)


class TroublesEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TroublesEnv(vf.Env[TroublesEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        attempts[task.data.action] += 1
        if task.data.action == "raise":
            raise ValueError("this env never runs")
        if task.data.action == "flaky" and attempts["flaky"] < 3:
            raise OSError("not yet")
        await agents.agent.run(task)
        if task.data.action == "raise_late":
            raise ValueError("this env fails after its agent played")
        if task.data.action == "slow":
            await asyncio.sleep(60)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:  # noqa: ARG002
        if task.data.action == "finalize":
            raise ValueError("this env cannot be judged")
