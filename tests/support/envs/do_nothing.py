"""An environment whose episodes do what their task says, without any model call.

`action`: `nothing`; `sleep` for `seconds`; `spin` (a busy loop that never yields) for `seconds`; `raise`;
`exit` (the worker process ends); `deaf` (sleeps, refuses to be cancelled); `talk` (one call to the policy);
`crash` (the episode fails outside of what verifiers records); `swap` (it answers for another task). Groups:
`raise`, `late` and `stray` (scoring raises an error, a TimeoutError, a CancelledError).
Loaded by its plain name: put this folder on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig

__all__ = ["DoNothingEnv", "DoNothingHarness", "DoNothingTaskset"]


class DoNothingData(vf.TaskData):
    action: str = "nothing"
    seconds: float = 0.0
    size: int = 0


class DoNothingTask(vf.Task[DoNothingData]):
    @vf.reward
    async def one(self) -> float:
        return 1.0


class DoNothingConfig(vf.TasksetConfig):
    num_tasks: int | None = 50
    """None: endless."""


class DoNothingTaskset(vf.Taskset[DoNothingTask, DoNothingConfig]):
    def __init__(self, config: DoNothingConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterable[DoNothingTask]:
        numbers = itertools.count() if self.config.num_tasks is None else range(self.config.num_tasks)
        for number in numbers:
            yield DoNothingTask(DoNothingData(prompt=f"task {number}"), self.config.task)


class DoNothingHarnessConfig(HarnessConfig):
    id: str = "do_nothing"


class DoNothingHarness(vf.Harness[DoNothingHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx,
        trace,  # noqa: ARG002
        runtime,  # noqa: ARG002
        endpoint,
        secret,
        mcp_urls,  # noqa: ARG002
        data,
    ) -> vf.ProgramResult:
        if data.action == "sleep":
            await asyncio.sleep(data.seconds)
        elif data.action == "spin":
            end = time.monotonic() + data.seconds
            while time.monotonic() < end:
                pass
        elif data.action == "raise":
            raise ValueError("this task always fails")
        elif data.action == "exit":
            os._exit(3)
        elif data.action == "deaf":
            await _deaf(data.seconds)
        elif data.action == "talk":
            await _talk(ctx, endpoint, secret, data)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _deaf(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await asyncio.sleep(end - time.monotonic())
        except asyncio.CancelledError:
            continue


async def _talk(ctx, endpoint: str, secret: str, data: DoNothingData) -> None:
    headers = {"Authorization": f"Bearer {secret}"}
    body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{endpoint}/chat/completions", json=body) as response,
    ):
        await response.read()


class DoNothingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class DoNothingEnv(vf.Env[DoNothingEnvConfig]):
    async def run(self, task: vf.Task, agents) -> None:
        await agents.agent.run(task)

    async def run_episode(self, task: vf.Task, *args, **kwargs) -> vf.Episode:
        if task.data.action == "crash":
            raise LookupError(f"no agent for {task.data.prompt}")
        if task.data.action == "swap":
            task = DoNothingTask(DoNothingData(prompt="another task"), task.config)
        return await super().run_episode(task, *args, **kwargs)

    async def score_group(self, task: vf.Task, episodes: list[vf.Episode]) -> None:
        if task.data.action == "raise":
            raise ValueError("this group cannot be scored")
        if task.data.action == "late":
            raise TimeoutError("the judge took too long")
        if task.data.action == "stray":
            raise asyncio.CancelledError
        for place, episode in enumerate(episodes):
            episode.traces[0].record_reward("place", float(place))
