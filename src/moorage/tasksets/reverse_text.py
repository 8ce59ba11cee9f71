"""Reverse a string: the taskset of the main job.

Owns: the generator of strings, the reward, and the conversations that warm up the starter model.

Promises: task i depends on the config and i alone, so a finite and an infinite taskset of one seed begin with
the same tasks; the reward is difflib's sequence ratio between the reply and the reversed text, from 0 to 1;
`conversations(seed)` is endless and, for one seed, always the same.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

__all__ = ["ReverseTextTaskset"]

_WORD_LIST = """
anchor apple basin beacon bird bridge cabin candle cargo chain cliff cloud coast copper corner crane
current deck delta drift ember engine fabric falcon ferry field forest gate glass grain harbor
hollow island ivory jetty kettle ladder lantern layer level lumber maple marble meadow mirror
mooring motor needle north ocean orchard paddle paper pebble pilot planet plum pocket quarry quiet
rail ribbon ripple river rope rudder sail salt sand shell signal silver slope south spark stone
storm stream summit table thread timber tower tunnel valley vessel violet wagon water whistle willow
window winter yellow zephyr
"""
WORDS = tuple(_WORD_LIST.split())

STOP_HAZARD = 0.35
"""Chance that a sloppy answer ends before each character."""
TYPO = 0.15
"""Chance that a character of a sloppy answer is another one."""


class ReverseTextData(vf.TaskData):
    """`prompt` is the text, `answer` the same reversed."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @vf.reward
    async def similarity(self, task: ReverseTextData, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, task.answer).ratio()

    @vf.metric
    async def exact(self, task: ReverseTextData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class ReverseTextConfig(vf.TasksetConfig):
    kind: Literal["letters", "words", "phrases"] = "letters"
    """`letters`: random lower-case strings. `words`: one word. `phrases`: two to four words."""

    min_length: int = Field(4, ge=1)
    """Shortest string of `letters`."""

    max_length: int = Field(8, ge=1)
    """Longest string of `letters`."""

    num_tasks: int | None = Field(1000, ge=1)
    """How many tasks there are. None: endless."""

    seed: int = 0
    """Other seeds give other tasks."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> ReverseTextConfig:
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length = {self.min_length} is above max_length = {self.max_length}; lower it or raise "
                "max_length"
            )
        return self


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    DEFAULT_HARNESS: ClassVar[str] = "moorage.env.direct"
    """Harness of agents that name none (read by moorage.env.resolve)."""

    def __init__(self, config: ReverseTextConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[ReverseTextTask]:
        indices = itertools.count() if self.config.num_tasks is None else range(self.config.num_tasks)
        for index in indices:
            text = make_text(random.Random(f"{self.config.seed}/{index}"), self.config)
            data = ReverseTextData(prompt=text, answer=text[::-1])  # type: ignore[call-arg]
            yield ReverseTextTask(data, self.config.task)

    def conversations(self, seed: int) -> Iterator[list[dict[str, str]]]:
        """Endless chats for the warm-up, drawn from `seed`.

        Half of them have an empty system turn and a right answer; the other half have none and a sloppy one:
        it stops early and has typos. Reinforcement learning, whose prompts have no system turn, then elicits
        under the second kind of prompt the skill that was taught under the first.
        """
        rng = random.Random(f"conversations/{seed}")
        while True:
            text = make_text(rng, self.config)
            user = {"role": "user", "content": text}
            if rng.random() < 0.5:
                system = {"role": "system", "content": ""}
                yield [system, user, {"role": "assistant", "content": text[::-1]}]
            else:
                yield [user, {"role": "assistant", "content": make_sloppy(rng, text[::-1])}]


def make_text(rng: random.Random, config: ReverseTextConfig) -> str:
    """One string of the configured kind."""
    if config.kind == "letters":
        length = rng.randint(config.min_length, config.max_length)
        return "".join(rng.choices(string.ascii_lowercase, k=length))
    count = 1 if config.kind == "words" else rng.randint(2, 4)
    return " ".join(rng.choices(WORDS, k=count))


def make_sloppy(rng: random.Random, answer: str) -> str:
    """`answer`, perhaps cut short and with typos."""
    written = []
    for character in answer:
        if rng.random() < STOP_HAZARD:
            break
        typo = rng.random() < TYPO
        written.append(rng.choice(string.ascii_lowercase) if typo else character)
    return "".join(written)
