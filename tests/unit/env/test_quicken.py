"""What is remembered of verifiers' answers equals what verifiers answers."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.task import task_key
from verifiers.v1.utils import decorators, loaders

from moorage.env import quicken as quick

find_marked = decorators.discover_decorated


class Base(vf.Task[vf.TaskData]):
    @vf.reward(priority=1)
    async def late(self, trace: vf.Trace) -> float:  # noqa: ARG002 - a hook's signature
        return 0.0

    @vf.reward(priority=2)
    async def early(self, task: vf.TaskData, trace: vf.Trace | None = None) -> float:  # noqa: ARG002
        return 1.0

    @vf.metric
    async def size(self, **kwargs: Any) -> float:  # noqa: ARG002
        return 2.0


class Derived(Base):
    async def late(self, trace: vf.Trace) -> float:  # noqa: ARG002 - no reward any more
        return 0.0

    @vf.reward
    async def own(self, *, runtime: Any) -> float:  # noqa: ARG002
        return 3.0


def make_task(cls: type[vf.Task] = Base, prompt: str = "hello") -> vf.Task:
    return cls(vf.TaskData(prompt=prompt))


def test_marked_methods_are_those_that_verifiers_finds_bound_to_their_own_object() -> None:
    for task in (make_task(Base), make_task(Derived), make_task(Derived)):
        for attr in ("reward", "metric", "stop", "intercept"):
            found = quick.discover_decorated(task, attr)
            assert found == find_marked(task, attr)
            assert all(method.__self__ is task for method in found)
    assert [method.__name__ for method in quick.discover_decorated(make_task(Base), "reward")] == [
        "early",
        "late",
    ]


def test_a_signature_is_the_one_that_inspect_gives() -> None:
    task = make_task(Derived)

    def plain(a: int, *, b: str = "x") -> None: ...

    for function in (task.early, task.late, task.own, task.size, task.setup, plain, Base.early, len):
        assert quick.signature_of(function) == inspect.signature(function)


def test_a_task_has_the_hash_of_its_data_also_when_it_is_a_copy_with_other_data() -> None:
    quick.quicken()
    task = make_task()
    assert task.hash == task.key == task_key(task.data.model_dump(mode="json", exclude_none=True))
    other = task.with_data(prompt="other")
    assert other.hash == make_task(prompt="other").hash != task.hash
    assert task.hash == copy.deepcopy(task).hash


def test_a_plugin_is_imported_once_and_a_missing_one_is_looked_for_again() -> None:
    quick.quicken()
    assert loaders.import_harness("bash") is loaders.import_harness("bash")
    assert loaders.harness_class("bash").__module__.startswith("verifiers.v1.harnesses")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_taskset"):
            loaders.import_taskset("no_such_taskset")


def test_quickening_again_changes_nothing() -> None:
    quick.quicken()
    before = (decorators.discover_decorated, loaders._import_plugin, vf.Task.__dict__["hash"].fget)
    quick.quicken()
    assert before == (decorators.discover_decorated, loaders._import_plugin, vf.Task.__dict__["hash"].fget)
