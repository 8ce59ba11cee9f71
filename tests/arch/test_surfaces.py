"""What others rely on, held equal to checked-in lists: config keys, records, routes.

A change here is a change of docs/protocols.md or of what people write in run files: make it there first, then
    python -m tests.arch.test_surfaces --update
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from pydantic import BaseModel

from tests.arch.layers import SOURCE

LISTS = Path(__file__).parent / "surfaces"
CONFIGS = (
    "moorage.config.run:RunConfig",
    "moorage.config.run:DerivedConfigs",
    "moorage.config.sft:SftConfig",
    "moorage.config.evaluation:EvaluationConfig",
)
RECORDS = ("moorage.records.payload", "moorage.records.sample")


def config_lines() -> Iterator[str]:
    """`Class.field: type = default` of every config class, each class once."""
    seen: dict[type[BaseModel], None] = {}
    for path in CONFIGS:
        module, _, name = path.partition(":")
        _collect(getattr(importlib.import_module(module), name), seen)
    for cls in sorted(seen, key=lambda c: c.__name__):
        for name, field in cls.model_fields.items():
            default = (
                "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
            )
            yield f"{cls.__name__}.{name}: {_type_text(field.annotation)} = {_one_line(default)}"


def record_lines() -> Iterator[str]:
    """`Record.field: type` of every wire record."""
    for module in RECORDS:
        for name, cls in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if cls.__module__ == module and issubclass(cls, msgspec.Struct):
                for field in msgspec.structs.fields(cls):
                    yield f"{name}.{field.name}: {_type_text(field.type)}"


def rpc_lines() -> Iterator[str]:
    """`method.field: type` of every request of the env server, and of its replies."""
    from moorage.env import protocol

    for method, request in protocol.METHODS.items():
        for field in msgspec.structs.fields(request):
            yield f"{method.decode()}.{field.name}: {_type_text(field.type)}"
    for name, cls in inspect.getmembers(protocol, inspect.isclass):
        if issubclass(cls, msgspec.Struct) and name.endswith("Reply"):
            for field in msgspec.structs.fields(cls):
                yield f"{name}.{field.name}: {_type_text(field.type)}"


def engine_route_lines() -> Iterator[str]:
    """`METHOD path` of every route that the built-in engine serves."""
    routes = set()
    for path in (SOURCE / "engine" / "builtin").glob("*.py"):
        for method, route in re.findall(r'web\.(get|post|delete)\("(/[^"]*)"', path.read_text()):
            routes.add(f"{method.upper()} {route}")
    yield from sorted(routes)


SURFACES: dict[str, Callable[[], Iterator[str]]] = {
    "config": config_lines,
    "records": record_lines,
    "rpc": rpc_lines,
    "engine_routes": engine_route_lines,
}


def _collect(cls: type[BaseModel], seen: dict[type[BaseModel], None]) -> None:
    if cls in seen:
        return
    seen[cls] = None
    for field in cls.model_fields.values():
        for inner in _models(field.annotation):
            _collect(inner, seen)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _type_text(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    )
    return text.replace("typing.", "").replace("moorage.", "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def read_list(name: str) -> list[str]:
    return (LISTS / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", SURFACES)
def test_the_surface_is_the_one_on_record(name: str) -> None:
    difference = list(
        difflib.unified_diff(read_list(name), list(SURFACES[name]()), "on record", "now", lineterm="", n=0)
    )
    assert not difference, "\n".join([*difference, "if meant: python -m tests.arch.test_surfaces --update"])


def update() -> None:
    """Write every list anew."""
    LISTS.mkdir(exist_ok=True)
    for name, lines in SURFACES.items():
        (LISTS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines()))


if __name__ == "__main__" and "--update" in sys.argv:
    update()
