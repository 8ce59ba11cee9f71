"""Small sums, scored by exact match.

Promises: task i depends on the config and i alone; the reward is 1 when the reply is the number and nothing
else, 0 otherwise; `conversations(seed)` is endless and, for one seed, always the same.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["ArithmeticTaskset"]

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticData(vf.TaskData):
    answer: str


class ArithmeticTask(vf.Task[ArithmeticData]):
    @vf.reward
    async def exact(self, task: ArithmeticData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class ArithmeticConfig(vf.TasksetConfig):
    operators: list[Literal["+", "-", "*"]] = Field(["+"], min_length=1)
    """Operations that occur."""

    largest: int = Field(99, ge=1)
    """Largest operand; the smallest is 0."""

    num_tasks: int | None = Field(1000, ge=1)
    """How many tasks there are. None: endless."""

    seed: int = 0
    """Other seeds give other tasks."""


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    DEFAULT_HARNESS: ClassVar[str] = "moorage.env.direct"

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[ArithmeticTask]:
        indices = itertools.count() if self.config.num_tasks is None else range(self.config.num_tasks)
        for index in indices:
            problem, answer = make_problem(random.Random(f"{self.config.seed}/{index}"), self.config)
            data = ArithmeticData(prompt=problem, answer=answer)  # type: ignore[call-arg]
            yield ArithmeticTask(data, self.config.task)

    def conversations(self, seed: int) -> Iterator[list[dict[str, str]]]:
        """Endless chats for the warm-up: problem and right answer."""
        rng = random.Random(f"conversations/{seed}")
        while True:
            problem, answer = make_problem(rng, self.config)
            yield [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]


def make_problem(rng: random.Random, config: ArithmeticConfig) -> tuple[str, str]:
    """A problem and its answer."""
    left, right = rng.randint(0, config.largest), rng.randint(0, config.largest)
    sign = rng.choice(config.operators)
    return f"{left}{sign}{right}=", str(OPERATORS[sign](left, right))
