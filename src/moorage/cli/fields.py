"""The text of `moorage COMMAND --help`: every field with its type, default and description."""

from __future__ import annotations

import textwrap
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

WIDTH = 100


def render_fields(cls: type[BaseModel], prefix: str = "") -> str:
    """One entry per field, nested tables after the plain fields of the table that holds them."""
    plain: list[str] = []
    nested: list[str] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{name}"
        inner = _table_of(field.annotation)
        if inner is None:
            plain.append(
                _entry(f"--{key} {_type_name(field.annotation)}{_default(field)}", field.description)
            )
            continue
        many = _is_list(field.annotation)
        title = f"[[{key}]]  (a list: --{key}.0., --{key}.1., ...)" if many else f"[{key}]"
        head = f"\n{title}\n" + textwrap.fill(field.description or "", WIDTH, **_INDENT) + "\n"
        nested.append(head + render_fields(inner, f"{key}.0." if many else f"{key}."))
    return "\n".join(plain + nested)


_INDENT: dict[str, Any] = {"initial_indent": "      ", "subsequent_indent": "      "}


def _entry(head: str, description: str | None) -> str:
    return f"  {head}\n" + textwrap.fill(" ".join((description or "").split()), WIDTH, **_INDENT)


def _table_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType):
        return next((m for m in map(_table_of, get_args(annotation)) if m is not None), None)
    return None


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(str(value) for value in inner) + "}"
    if origin in (Union, types.UnionType):
        return "|".join(_type_name(a) for a in inner if a is not type(None))
    if origin is not None:
        return {list: "list", dict: "table", tuple: "list"}.get(origin, str(origin))
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "  (required)"
    value = (
        field.default
        if field.default is not PydanticUndefined
        else field.get_default(call_default_factory=True)
    )
    return "" if value is None else f"  (default {value})"
