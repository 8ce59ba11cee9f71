"""Tasks that a worker would not get from the wire as they are, by data, key and hash, are refused (R22)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import Field

from moorage.core.errors import ConfigError
from moorage.env.environment import check_wire, describe

NUMBERS = itertools.count()


class Data(vf.TaskData):
    tags: Any = Field(default_factory=list)


class Named(Data):
    names: set[str]


class WithNames(vf.Task[Named]): ...


class Plain(vf.Task[Data]): ...


class Numbered(vf.Task[Data]):
    @property
    def key(self) -> str:
        return str(next(NUMBERS))


class PlainTaskset(vf.Taskset[Plain, vf.TasksetConfig]):
    def load(self) -> Iterable[Plain]:
        return []


class NamedTaskset(vf.Taskset[WithNames, vf.TasksetConfig]):
    def load(self) -> Iterable[WithNames]:
        return []


class NumberedTaskset(vf.Taskset[Numbered, vf.TasksetConfig]):
    def load(self) -> Iterable[Numbered]:
        return []


def test_a_task_travels_with_its_key_and_hash() -> None:
    task = Plain(Data(prompt="p", tags=["a"]))
    sent = describe(task)
    assert (sent.type, sent.key, sent.hash) == ("Plain", task.key, task.hash)
    assert sent.data["tags"] == ["a"]
    check_wire(PlainTaskset(vf.TasksetConfig()), task)


def test_data_that_changes_on_the_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"field `tags` does not survive the wire"):
        check_wire(PlainTaskset(vf.TasksetConfig()), Plain(Data(prompt="p", tags=("a",))))
    with pytest.raises(ConfigError, match=r"field `names` holds a set"):
        check_wire(NamedTaskset(vf.TasksetConfig()), WithNames(Named(prompt="p", names={"a", "b"})))


def test_a_key_that_changes_on_the_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its key is '0' here and '1' behind the wire"):
        check_wire(NumberedTaskset(vf.TasksetConfig()), Numbered(Data(prompt="p")))
