"""verifiers' answers about code, remembered. No value changes.

For every rollout verifiers asks again what depends on classes or on a task alone, which is a tenth of the CPU
of a short one. `quicken` has these answers remembered:

| what | for whom |
|---|---|
| the signature of a hook | the function of the bound method |
| the names of the methods that a decorator marked | class and decorator |
| the module of a plugin | its id and kind |
| a task's content hash | the task, as long as it has the same data (which is frozen) |
| that a default factory of a message node takes no argument | the field |

Promises: hooks are found and called as ever, each on its own object; no answer about a rollout is remembered;
a repeated call changes nothing. Does not know: environments, episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from types import MethodType, SimpleNamespace
from typing import Any

from verifiers.v1 import harness, rollout, task
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils import decorators, loaders

_CLASSES = 4096
_HASH = "_moorage_hash"
_hash_of = task.Task.hash.fget
_import_plugin = loaders._import_plugin


def quicken() -> None:
    """Put the remembering answers in the place of verifiers' own, in this process, for good."""
    decorators.inspect = SimpleNamespace(signature=signature_of)  # type: ignore[attr-defined]
    for module in (decorators, task, rollout, harness):
        module.discover_decorated = discover_decorated  # type: ignore[attr-defined]
    loaders._import_plugin = _import_once
    task.Task.hash = property(task_hash)  # type: ignore[assignment]
    for field in MessageNode.model_fields.values():
        factory = field.default_factory
        if factory is not None and not hasattr(factory, "__signature__"):
            field.default_factory = _stating(factory)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`."""
    if type(function) is MethodType:
        return _signature_of_method(function.__func__)
    return inspect.signature(function)


@lru_cache(_CLASSES)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def discover_decorated(obj: object, attr: str) -> list[Callable[..., Any]]:
    """As verifiers' own: the bound methods of `obj` marked with `attr`, by priority, then name."""
    named = [getattr(obj, name) for name in _marked_names(type(obj), attr)]
    methods = [method for method in named if hasattr(method, attr)]  # an unmarked override hides a marked one
    methods.sort(key=lambda method: (-getattr(method, f"{attr}_priority", 0), method.__name__))
    return methods


@lru_cache(_CLASSES)
def _marked_names(cls: type, attr: str) -> frozenset[str]:
    return frozenset(
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if callable(member) and hasattr(member, attr)
    )


def task_hash(self: task.Task) -> str:
    """As `Task.hash`. A rollout asks for it four times."""
    known = vars(self).get(_HASH)
    if known is None or known[0] is not self.data:
        known = vars(self)[_HASH] = (self.data, _hash_of(self))  # type: ignore[misc]
    return known[1]


_import_once = cache(_import_plugin)


def _stating(factory: Callable[..., Any]) -> Callable[[], Any]:
    """`factory` with a signature that need not be inspected: for builtins that means parsing source text."""

    def make() -> Any:
        return factory()

    make.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    return make
