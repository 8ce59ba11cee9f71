"""An env whose class says how its agent is sampled."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["OpinionatedEnv"]


class OpinionatedEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(top_p=0.5))


class OpinionatedEnv(vf.Env[OpinionatedEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
