"""An env that says one more thing after the first answer: two turns of one conversation."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["ChatterEnv"]


class ChatterEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class ChatterEnv(vf.Env[ChatterEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            answer = await talk.turn()
            if not answer.terminated:
                await talk.turn("go on")
