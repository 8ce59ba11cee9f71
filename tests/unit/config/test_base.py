"""Errors of config files are lines that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from moorage.config.base import Config, load_config, make_config, suggestion
from moorage.core.errors import ConfigError


class Inner(Config):
    """Inner."""

    width: int = Field(default=1, ge=1)
    """Width."""


class Outer(Config):
    """Outer."""

    name: str
    """Name."""

    inner: Inner = Inner()
    """Inner."""

    many: list[Inner] = Field(default_factory=list)
    """Many."""

    perhaps: Inner | None = None
    """Perhaps."""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"nam": "x"}, ["`name` is required", "unknown key `nam`", "did you mean `name`"]),
        ({"name": "x", "inner": {"widht": 2}}, ["unknown key `inner.widht`", "did you mean `width`"]),
        ({"name": "x", "many": [{"widht": 2}]}, ["`many.0.widht`", "did you mean `width`"]),
        ({"name": "x", "perhaps": {"widht": 2}}, ["perhaps", "did you mean `width`"]),
        ({"name": "x", "inner": {"width": 0}}, ["`inner.width`", "greater than or equal to 1", "given: 0"]),
        ({"name": "x", "zzz": 1}, ["unknown key `zzz`", "valid: inner, many, name, perhaps"]),
    ],
)
def test_each_fault_is_named_with_its_remedy(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(Outer, data, source="here")
    message = str(caught.value)
    assert message.startswith("here: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_assignments_are_checked_too() -> None:
    config = make_config(Outer, {"name": "x"})
    with pytest.raises(ValueError, match="greater than or equal"):
        config.inner.width = 0


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ConfigError, match=r"a\.json: no such config file"):
        load_config(Outer, path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(Outer, path)
    path.write_text(json.dumps({"name": "x"}))
    assert load_config(Outer, path).name == "x"


def test_a_suggestion_is_the_nearest_name_or_all_of_them() -> None:
    assert suggestion("batch_sise", ["batch_size", "group_size"]) == " (did you mean `batch_size`?)"
    assert suggestion("q", ["b", "a"]) == " (valid: a, b)"
    assert suggestion("q", []) == ""
