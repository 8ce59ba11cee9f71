"""The command line: files, dotted overrides, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moorage.cli.arguments import merge, parse_arguments, read_config
from moorage.config.base import Config
from moorage.config.run import RunConfig
from moorage.core.errors import ConfigError

TOML = """
max_steps = 3
[model]
path = "m"
[orchestrator]
batch_size = 16
[[orchestrator.train]]
env = { taskset = { id = "moorage.tasksets.reverse_text" } }
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def read(run_toml: Path, *args: str) -> RunConfig:
    return read_config(RunConfig, parse_arguments(["@", str(run_toml), *args], ("clean",)))[0]


def test_a_file_is_read_and_overrides_win(run_toml: Path) -> None:
    config = read(run_toml, "--max_steps", "7", "--orchestrator.batch-size=8", "--model.path", "other")
    assert (config.max_steps, config.orchestrator.batch_size, config.model.path) == (7, 8, "other")


def test_later_files_win_table_by_table(run_toml: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.json"
    over.write_text('{"orchestrator": {"batch_size": 4}, "name": "b"}')
    config = read(run_toml, "@", str(over))
    assert (config.name, config.orchestrator.batch_size, len(config.orchestrator.train)) == ("b", 4, 1)


def test_switches_are_not_keys(run_toml: Path) -> None:
    arguments = parse_arguments(["@", str(run_toml), "--clean", "--max_steps", "2"], ("clean", "dry-run"))
    assert arguments.switches == {"clean"}
    assert arguments.overrides == (("max_steps", "2"),)


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("name", "12", "12"),
        ("name", "true", "true"),
        ("seed", "12", 12),
        ("trainer.compile", None, True),
        ("trainer.compile", "false", False),
        ("orchestrator.batch_size", "null", None),
        ("trainer.optimizer.lr", "0", 0.0),
        ("trainer.optimizer.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("trainer.loss", '{type = "cispo", high = 5.0}', {"type": "cispo", "high": 5.0}),
        ("trainer.loss.eps", "0.2", {"type": "ipo", "eps": 0.2}),
        ("trainer.loss", '{"type": "ppo"}', {"type": "ppo"}),
    ],
)
def test_values_are_read_as_the_field_wants_them(
    run_toml: Path, key: str, raw: str | None, expected: Any
) -> None:
    args = [f"--{key}"] if raw is None else [f"--{key}", raw]
    if key == "trainer.loss.eps":
        args = ["--trainer.loss.type", "ipo", *args]
    value: Any = read(run_toml, *args)
    for part in key.removesuffix(".eps").split("."):
        value = getattr(value, part)
    assert value == expected


def test_list_entries_are_reached_by_index(run_toml: Path) -> None:
    config = read(
        run_toml, "--orchestrator.train.0.num_workers", "3", "--orchestrator.train.0.env.taskset.n", "5"
    )
    assert config.orchestrator.train[0].num_workers == 3
    assert config.orchestrator.train[0].env["taskset"] == {"id": "moorage.tasksets.reverse_text", "n": 5}
    with pytest.raises(ConfigError, match="is a list of 1"):
        read(run_toml, "--orchestrator.train.4.num_workers", "3")


def test_everything_can_come_from_the_command_line() -> None:
    args = ["--max_steps=1", "--model.path=m", "--orchestrator.train.0.env.taskset.id", "t"]
    config, _ = read_config(RunConfig, parse_arguments(args))
    assert config.orchestrator.train[0].name == "t"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--orchestrator.batch_sise", "8"],
            r"unknown key `orchestrator.batch_sise` \(did you mean `batch_size`",
        ),
        (["--max_step", "8"], r"unknown key `max_step` \(did you mean `max_steps`"),
        (["--claen"], r"unknown key `claen` \(did you mean `clean`"),
        (["--max_steps", "many"], r"`max_steps`.*given: 'many'"),
        (["--max_steps", "0"], "greater than or equal to 1"),
        (["--max_steps.x", "0"], "`max_steps` is 3, which has no key `x`"),
        (["stray"], "unexpected argument 'stray'"),
        (["@"], "`@` needs a file"),
        (["@", "none.toml"], "none.toml: no such config file"),
        (["--orchestrator.train.0.sampling.temprature", "1"], "did you mean `temperature`"),
    ],
)
def test_what_cannot_work_is_one_error_with_a_remedy(run_toml: Path, args: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(RunConfig, parse_arguments(["@", str(run_toml), *args], ("clean",)), ("clean",))


def test_broken_files_are_named(tmp_path: Path) -> None:
    for name, text, words in (
        ("a.toml", "x = ", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("b.json", "[1]", "holds no table"),
        ("a.yaml", "", r"ends in .toml or .json"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_config(RunConfig, parse_arguments(["@", str(path)]))


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(base, over) == {"a": {"b": 1, "c": 2}}
    assert (base, over) == ({"a": {"b": 1}}, {"a": {"c": 2}})


def test_every_config_field_has_a_description() -> None:
    seen: list[type[Config]] = []

    def visit(cls: type[Config]) -> None:
        seen.append(cls)
        for name, field in cls.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Config) and inner not in seen:
                visit(inner)
            assert field.description or inner in seen, f"{cls.__name__}.{name}"

    visit(RunConfig)
    assert len(seen) > 8
