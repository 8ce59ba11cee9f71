"""The base of every config class, and loading with errors that a person can act on.

Config files are TOML (`moorage rl @ run.toml --dotted.key value`), parsed by prime-pydantic-config as
verifiers' own are. Unknown keys are errors with a suggestion.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_config import BaseConfig as _BaseConfig

from moorage.core.errors import ConfigError


class Config(_BaseConfig):
    """Strict: unknown keys are errors; validated again on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def make_config(cls: type[ConfigT], data: dict[str, Any], *, source: str = "config") -> ConfigT:
    """`cls` from plain data. Raises ConfigError naming each bad key, its value, and the nearest valid key."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, cls)}") from None


def load_config(cls: type[ConfigT], path: Path) -> ConfigT:
    """`cls` from a derived JSON file (`configs/*.json`)."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    return make_config(cls, data, source=str(path))


def explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """A line per problem: where, what was given, what is valid there."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or cls.__name__
        if item["type"] == "extra_forbidden":
            lines.append(
                f"unknown key `{where}`{suggestion(str(item['loc'][-1]), _siblings(cls, item['loc']))}"
            )
        elif item["type"] == "missing":
            lines.append(f"`{where}` is required")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
            lines.append(f"`{where}`: {message}{shown}")
    return "; ".join(lines)


def suggestion(wrong: str, valid: list[str]) -> str:
    """` (did you mean `x`?)`, or the list of valid names when none is near."""
    near = difflib.get_close_matches(wrong, valid, n=1, cutoff=0.6)
    if near:
        return f" (did you mean `{near[0]}`?)"
    return f" (valid: {', '.join(sorted(valid))})" if valid else ""


def _siblings(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    classes: list[type[BaseModel]] = [cls]
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        found = [
            m for c in classes if part in c.model_fields for m in _models(c.model_fields[part].annotation)
        ]
        classes = found or classes  # a union tag in the path names no field
    return [name for c in classes for name in c.model_fields]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
