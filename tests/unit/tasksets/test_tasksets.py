"""The tasksets that moorage brings: reproducible, scored right, and able to warm a starter model up."""

from __future__ import annotations

import asyncio
import itertools
import string

import pytest
import verifiers.v1 as vf
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage

from moorage.env.resolve import load_taskset, resolve_env
from moorage.tasksets.proposer_solver import read_problem
from moorage.tasksets.reverse_text import ReverseTextConfig, ReverseTextTaskset

ALL = ["reverse_text", "arithmetic", "proposer_solver"]


def load(name: str, **fields):
    return load_taskset(resolve_env({"taskset": {"id": f"moorage.tasksets.{name}", **fields}}, "train")[0])


def score(task: vf.Task, reply: str) -> vf.Trace:
    """The trace of an agent that answered `reply`, with the task's own rewards."""
    trace = vf.Trace(
        task=TraceTask(type="t", data=task.data),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=AssistantMessage(content=reply), sampled=True)],
    )
    asyncio.run(task.score(trace))
    return trace


@pytest.mark.parametrize("name", ALL)
def test_endless_and_finite_tasksets_of_one_seed_begin_alike(name: str) -> None:
    finite = [task.data.model_dump() for task in load(name, num_tasks=6, seed=3)]
    endless = load(name, num_tasks=None, seed=3)
    assert endless.INFINITE
    assert [task.data.model_dump() for task in itertools.islice(endless, 6)] == finite
    assert [task.data.model_dump() for task in load(name, num_tasks=6, seed=4)] != finite


def test_letters_have_the_asked_lengths() -> None:
    texts = [task.data.prompt for task in load("reverse_text", num_tasks=400)]
    assert {len(text) for text in texts} == {4, 5, 6, 7, 8}
    assert set("".join(texts)) == set(string.ascii_lowercase)


def test_words_and_phrases_are_made_of_words() -> None:
    words = [task.data.prompt for task in load("reverse_text", kind="words", num_tasks=50)]
    phrases = [task.data.prompt for task in load("reverse_text", kind="phrases", num_tasks=50)]
    assert all(word.isalpha() for word in words)
    assert {phrase.count(" ") for phrase in phrases} == {1, 2, 3}


def test_the_reward_is_the_sequence_ratio_to_the_reversed_text() -> None:
    task = next(iter(load("reverse_text")))
    right = task.data.answer
    assert score(task, right).reward == 1.0
    assert score(task, "").reward == 0.0
    assert score(task, right[:-1]).reward == pytest.approx(2 * (len(right) - 1) / (2 * len(right) - 1))
    assert score(task, right).metrics["exact"] == 1.0
    assert score(task, right + "x").metrics["exact"] == 0.0


def test_half_of_the_warm_up_is_clean_under_a_system_turn_and_half_is_sloppy() -> None:
    taskset = ReverseTextTaskset(ReverseTextConfig())
    rows = list(itertools.islice(taskset.conversations(5), 4000))
    assert rows == list(itertools.islice(taskset.conversations(5), 4000))
    clean = [row for row in rows if row[0]["role"] == "system"]
    sloppy = [row for row in rows if row[0]["role"] != "system"]
    assert len(clean) / len(rows) == pytest.approx(0.5, abs=0.03)
    assert all(row[0]["content"] == "" for row in clean)
    assert all(row[2]["content"] == row[1]["content"][::-1] for row in clean)
    stopped = sum(row[1]["content"] == "" for row in sloppy) / len(sloppy)
    assert stopped == pytest.approx(0.35, abs=0.03)
    pairs = [
        (a, b) for row in sloppy for a, b in zip(row[1]["content"], row[0]["content"][::-1], strict=False)
    ]
    typos = sum(a != b for a, b in pairs) / len(pairs)
    assert typos == pytest.approx(0.15 * 25 / 26, abs=0.02)


def test_arithmetic_wants_the_number_and_nothing_else() -> None:
    for task in load("arithmetic", num_tasks=20, operators=["+", "-", "*"]):
        assert eval(task.data.prompt.rstrip("=")) == int(task.data.answer)
        assert score(task, task.data.answer).reward == 1.0
        assert score(task, f"{task.data.answer}.").reward == 0.0


def test_a_problem_is_read_from_a_proposal_or_not_at_all() -> None:
    assert read_problem("How about 12+7=?") == ("12+7=", "19")
    assert read_problem("3*4") == ("3*4=", "12")
    assert read_problem("I would rather not") is None
