"""Tasks with hooks at the model boundary: what they stop, rewrite and refuse shows in the trace.

`action`: `plain`; `stop_second` (a stop before the second turn); `rewrite` (the answer is replaced); `hush`
(the user's words are replaced); `broken` (a hook raises); `limit` (see the agent's `max_turns`).
"""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.types import AssistantMessage, Request, Response, UserMessage

__all__ = ["HooksEnv", "HooksTaskset"]

ACTIONS = ("plain", "stop_second", "rewrite", "hush", "broken", "limit")


class HookData(vf.TaskData):
    action: str = "plain"


class HookTask(vf.Task[HookData]):
    @vf.stop
    async def second_turn(self, trace: vf.Trace) -> bool:
        if self.data.action == "broken":
            raise ValueError("this hook is broken")
        return self.data.action == "stop_second" and trace.num_turns == 1

    @vf.intercept
    async def replace_answer(self, response: Response) -> Response | None:
        if self.data.action != "rewrite":
            return None
        return response.model_copy(update={"message": AssistantMessage(content="rewritten")})

    @vf.intercept
    async def replace_question(self, request: Request) -> Request | None:
        if self.data.action != "hush":
            return None
        changed = [
            UserMessage(content="hush") if isinstance(message, UserMessage) else message
            for message in request.messages
        ]
        return request.model_copy(update={"messages": changed})

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class HooksTaskset(vf.Taskset[HookTask]):
    DEFAULT_HARNESS = "moorage.env.direct"

    def load(self) -> Iterable[HookTask]:
        for action in ACTIONS:
            yield HookTask(HookData(prompt=action, system_prompt="be brief", action=action), self.config.task)


class HooksEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class HooksEnv(vf.Env[HooksEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            answer = await talk.turn()
            for words in ("more", "and more"):
                if not answer.terminated:
                    answer = await talk.turn(words)
