"""The command line of every subcommand: `@ file` ..., then `--dotted.key value` ..., and a few switches.

Promises:
- later files and keys win over earlier ones; files are TOML or JSON; tables are merged, lists are replaced;
- a value is read as TOML, then as JSON, and kept as text when the field wants text or neither reads it;
- anything that cannot be understood is a ConfigError naming it.

It does not know which subcommands there are.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from moorage.config.base import make_config, suggestion
from moorage.core.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line. `overrides` pair a dotted key with its raw text (None: a bare `--key`)."""

    files: tuple[str, ...]
    overrides: tuple[tuple[str, str | None], ...]
    switches: frozenset[str]


def parse_arguments(args: Iterable[str], switches: Iterable[str] = ()) -> Arguments:
    """Split a command line. `switches` are the bare words (without dashes) that are no config keys."""
    known = set(switches)
    files: list[str] = []
    overrides: list[tuple[str, str | None]] = []
    found: set[str] = set()
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "@":
            if not rest:
                raise ConfigError("`@` needs a file: `@ run.toml`")
            files.append(rest.pop(0))
        elif word.startswith("@"):
            files.append(word[1:])
        elif word.startswith("--") and word[2:].replace("_", "-") in known:
            found.add(word[2:].replace("_", "-"))
        elif word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            if equals:
                overrides.append((key, value))
            else:
                overrides.append((key, rest.pop(0) if rest and _is_value(rest[0]) else None))
        else:
            raise ConfigError(f"unexpected argument {word!r}; write `@ FILE` or `--dotted.key VALUE`")
    return Arguments(tuple(files), tuple(overrides), frozenset(found))


def read_config(
    cls: type[ConfigT], arguments: Arguments, switches: Iterable[str] = ()
) -> tuple[ConfigT, dict[str, Any]]:
    """The config that a command line describes, and the plain data it was made of.

    `switches`: known ones, for the suggestion when a top-level key is wrong.
    """
    data: dict[str, Any] = {}
    for name in arguments.files:
        data = merge(data, read_config_file(Path(name)))
    for key, raw in arguments.overrides:
        path = tuple(part.replace("-", "_") for part in key.split("."))
        if len(path) == 1 and path[0] not in cls.model_fields:
            known = [*cls.model_fields, *switches]
            raise ConfigError(f"command line: unknown key `{path[0]}`{suggestion(path[0], known)}")
        _set(data, path, _interpret(_annotation_at(cls, path), raw))
    source = ", ".join(arguments.files) if arguments.files and not arguments.overrides else "configuration"
    if arguments.files and arguments.overrides:
        source = f"{', '.join(arguments.files)} and command line"
    return make_config(cls, data, source=source), data


def read_config_file(path: Path) -> dict[str, Any]:
    """A TOML or JSON file as plain data."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            data = json.loads(text)
            if isinstance(data, dict):
                return data
            raise ConfigError(f"{path}: holds no table at its top")
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()} ({error})") from None
    raise ConfigError(f"{path}: a config file ends in .toml or .json")


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _is_value(word: str) -> bool:
    return not word.startswith("--") and word != "@"


def _annotation_at(cls: type[BaseModel], path: tuple[str, ...]) -> Any:
    """The annotation of the field at `path`; Any inside untyped tables and where there is no such field."""
    current: Any = cls
    for part in path:
        model = next(_models_in(current), None)
        if model is not None and part in model.model_fields:
            current = model.model_fields[part].annotation
        elif model is None or not part.isdigit():
            return Any
    return current


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _interpret(annotation: Any, raw: str | None) -> Any:
    if raw is None:
        return True
    if raw in ("None", "null"):
        return None
    value = _read_literal(raw)
    if annotation is Any or isinstance(value, str):
        return value
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return raw if _accepts_text(annotation, raw) else value
    return value


def _accepts_text(annotation: Any, raw: str) -> bool:
    try:
        TypeAdapter(annotation).validate_python(raw)
    except ValidationError:
        return False
    return True


def _read_literal(raw: str) -> Any:
    """`raw` as a TOML value, else as JSON, else as the text that it is."""
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        try:
            value = json.loads(raw)
        except ValueError:
            return raw
    return value if isinstance(value, bool | int | float | str | list | dict) else raw


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put `value` at `path`, making tables and lists on the way."""
    holder: Any = data
    for index, part in enumerate(path):
        key: Any = part
        last = index == len(path) - 1
        fresh: Any = [] if not last and path[index + 1].isdigit() else {}
        where = ".".join(path[:index]) or "the top"
        if isinstance(holder, list):
            if not part.isdigit() or int(part) > len(holder):
                raise ConfigError(f"`{where}` is a list of {len(holder)}; `{part}` is no place in it")
            if int(part) == len(holder):
                holder.append(value if last else fresh)
            key = int(part)
        elif not isinstance(holder, dict):
            raise ConfigError(f"`{where}` is {holder!r}, which has no key `{part}`")
        if last:
            holder[key] = value
        else:
            if isinstance(holder, dict):
                holder.setdefault(key, fresh)
            holder = holder[key]
