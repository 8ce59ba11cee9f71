"""A proposer sets a sum, solvers work it out: two roles that learn from each other.

The proposer is rewarded when its problem is neither trivial nor hopeless: 1 when half of the solvers solve
it, 0 when all or none do, or when its reply is no problem at all. A solver is rewarded for the right number.

Promises: an episode has one proposer trace and, when the proposal can be read, `num_solvers` solver traces;
a role with `train_proposer` or `train_solver` off plays but never trains.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from typing import ClassVar

import verifiers.v1 as vf
from pydantic import Field

from moorage.tasksets.arithmetic import OPERATORS, ArithmeticData, ArithmeticTask

__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]

_PROBLEM = re.compile(r"(\d{1,4})([+*-])(\d{1,4})=?")


class ProposalTask(vf.Task[vf.TaskData]):
    """Asks for a problem; it is judged by the solvers' success (`ProposerSolverEnv.finalize`)."""


class ProposerSolverConfig(vf.TasksetConfig):
    largest: int = Field(99, ge=1)
    """Size of the numbers that the proposer is asked for."""

    num_tasks: int | None = Field(1000, ge=1)
    """How many tasks there are. None: endless."""

    seed: int = 0
    """Other seeds give other tasks."""


class ProposerSolverTaskset(vf.Taskset[ProposalTask, ProposerSolverConfig]):
    DEFAULT_HARNESS: ClassVar[str] = "moorage.env.direct"

    def __init__(self, config: ProposerSolverConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[ProposalTask]:
        indices = itertools.count() if self.config.num_tasks is None else range(self.config.num_tasks)
        for index in indices:
            rng = random.Random(f"{self.config.seed}/{index}")
            near = rng.randint(0, self.config.largest)
            prompt = f"Set a {rng.choice(list(OPERATORS))} problem near {near}."
            yield ProposalTask(vf.TaskData(prompt=prompt), self.config.task)  # type: ignore[call-arg]


class ProposerSolverEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()

    num_solvers: int = Field(2, ge=1)
    """Solvers per proposal."""

    train_proposer: bool = True
    """Whether the proposer's tokens train the policy."""

    train_solver: bool = True
    """Whether the solvers' tokens train the policy."""


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.proposer.trainable = self.config.train_proposer
        agents.solver.trainable = self.config.train_solver

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        proposal = await agents.proposer.run(task)
        problem = read_problem(proposal.last_reply)
        if problem is None:
            return
        text, answer = problem
        data = ArithmeticData(idx=task.data.idx, prompt=text, answer=answer)  # type: ignore[call-arg]
        solve = ArithmeticTask(data)
        await asyncio.gather(*(agents.solver.run(solve) for _ in range(self.config.num_solvers)))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:  # noqa: ARG002 - verifiers' hook
        solved = [trace.reward for trace in episode.traces if trace.agent.name == "solver"]
        share = sum(solved) / len(solved) if solved else 0.0
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("difficulty", 1.0 - abs(2.0 * share - 1.0))
                trace.record_metric("readable", float(bool(solved)))


def read_problem(reply: str) -> tuple[str, str] | None:
    """The first problem in a reply and its answer, None when there is none."""
    found = _PROBLEM.search(reply)
    if found is None:
        return None
    left, sign, right = int(found[1]), found[2], int(found[3])
    return f"{left}{sign}{right}=", str(OPERATORS[sign](left, right))
