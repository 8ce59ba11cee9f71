"""The `moorage` command as a person meets it, in a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.core.rundir import RunDir, mark_ready, write_end, write_json_atomic

TOML = """
max_steps = 3
seq_len = 64
[model]
path = "{model}"
[orchestrator]
batch_size = 16
[[orchestrator.train]]
env = {{ taskset = {{ id = "{taskset}" }} }}
"""


def moorage(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moorage.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def write_run(tmp_path: Path, model: Path | str, taskset: str = "moorage.tasksets.reverse_text") -> str:
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(model=model, taskset=taskset))
    return str(path)


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("moorage: error: ")
    for word in words:
        assert word in done.stderr


def test_help_names_every_command(tmp_path: Path) -> None:
    done = moorage(tmp_path, "--help")
    assert done.returncode == 0
    for command in ("rl", "sft", "inference", "env-server", "orchestrator", "trainer", "eval", "ledger"):
        assert f"\n  {command} " in done.stdout


def test_help_of_a_command_lists_fields_with_descriptions(tmp_path: Path) -> None:
    done = moorage(tmp_path, "rl", "--help")
    assert done.returncode == 0
    for words in (
        "--dry-run",
        "--orchestrator.batch_size int",
        "Traces per step",
        "--orchestrator.train.0.ratio",
    ):
        assert words in done.stdout


def test_a_wrong_command_is_refused_with_the_right_one(tmp_path: Path) -> None:
    assert_one_line(moorage(tmp_path, "trian"), "did you mean `trainer`")


def test_a_wrong_key_is_refused_with_the_right_one(tmp_path: Path, dense_model: Path) -> None:
    run = write_run(tmp_path, dense_model)
    done = moorage(tmp_path, "rl", "@", run, "--orchestrator.batch_sise", "8")
    assert_one_line(done, "orchestrator.batch_sise", "`batch_size`")


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    assert_one_line(moorage(tmp_path, "rl", "@", write_run(tmp_path, "no/model")), "no/model", "moorage sft")


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path, dense_model: Path) -> None:
    done = moorage(tmp_path, "rl", "@", write_run(tmp_path, dense_model), "--seq_len", "513")
    assert_one_line(done, "seq_len 513", "512 or less")


def test_a_taskset_that_cannot_be_imported_is_refused(tmp_path: Path, dense_model: Path) -> None:
    run = write_run(tmp_path, dense_model, "no_such_taskset")
    assert_one_line(moorage(tmp_path, "rl", "@", run), "no_such_taskset", "cannot be imported")


def test_a_port_in_use_is_refused(tmp_path: Path, dense_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = moorage(tmp_path, "rl", "@", write_run(tmp_path, dense_model), "--inference.port", str(port))
    assert_one_line(done, f"port {port}", "in use")


def test_a_dry_run_writes_every_config_and_starts_nothing(tmp_path: Path, dense_model: Path) -> None:
    run = write_run(tmp_path, dense_model)
    done = moorage(tmp_path, "rl", "@", run, "--dry-run")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "run"
    written = {p.name for p in (folder / "configs").iterdir()}
    assert {"run.json", "inference.json", "orchestrator.json", "trainer.json", "envs"} <= written
    assert (folder / "run.toml").read_text() == Path(run).read_text()
    assert not (folder / "logs").exists()
    trainer = json.loads((folder / "configs" / "trainer.json").read_text())
    assert trainer["facts"]["max_steps"] == 3
    assert moorage(tmp_path, "rl", "@", run, "--dry-run").returncode == 0


def test_a_folder_that_holds_a_run_is_refused_without_resume_or_clean(
    tmp_path: Path, dense_model: Path
) -> None:
    run = write_run(tmp_path, dense_model)
    folder = tmp_path / "runs" / "run"
    (folder / "batches").mkdir(parents=True)
    assert_one_line(moorage(tmp_path, "rl", "@", run), "holds a run already", "--resume", "--clean")
    assert_one_line(moorage(tmp_path, "rl", "@", run, "--resume"), "no whole checkpoint")
    assert_one_line(moorage(tmp_path, "rl", "@", run, "--resume", "--clean"), "exclude each other")
    assert moorage(tmp_path, "rl", "@", run, "--clean", "--dry-run").returncode == 0
    assert (folder / "batches").exists()


def make_run(tmp_path: Path) -> RunDir:
    """A run that was killed after a whole checkpoint of step 2."""
    run = RunDir(tmp_path / "runs" / "run")
    write_json_atomic(run.configs / "orchestrator.json", {"facts": {"run_id": "abc", "attempt": 4}})
    for step in (1, 2, 3):
        mark_ready(run.weight(step))
        mark_ready(run.batch(step))
    for part in ("trainer", "orchestrator"):
        mark_ready(run.checkpoint(2, part))
    write_json_atomic(run.metrics("trainer"), {"step": 3, "time": 1.0})
    write_end(run, "failed", "killed")
    return run


def content(run: RunDir) -> dict[Path, bytes]:
    """Every file of the run but the lock and what a dry run wrote aside."""
    files = (path for path in run.root.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files if "dry-run" not in path.parts}


@pytest.mark.parametrize("switch", ["--clean", "--resume"])
def test_a_refused_config_costs_a_run_that_is_there_nothing(
    tmp_path: Path, dense_model: Path, switch: str
) -> None:
    toml, run = write_run(tmp_path, dense_model), make_run(tmp_path)
    before = content(run)
    external = ("--orchestrator.train.0.address", "tcp://127.0.0.1:9")
    assert_one_line(moorage(tmp_path, "rl", "@", toml, switch, *external), "MOORAGE_TOKEN")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = moorage(tmp_path, "rl", "@", toml, switch, "--inference.port", port)
    assert_one_line(done, "in use")
    assert content(run) == before


@pytest.mark.parametrize("switch", ["--clean", "--resume"])
def test_a_dry_run_beside_a_run_writes_its_configs_apart(
    tmp_path: Path, dense_model: Path, switch: str
) -> None:
    toml, run = write_run(tmp_path, dense_model), make_run(tmp_path)
    before = content(run)
    done = moorage(tmp_path, "rl", "@", toml, switch, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert content(run) == before
    apart = run.root / "dry-run"
    assert str(apart.relative_to(tmp_path) / "configs" / "trainer.json") in done.stdout
    facts = json.loads((apart / "configs" / "trainer.json").read_text())["facts"]
    assert facts["attempt"] == {"--clean": 1, "--resume": 5}[switch]
    assert (apart / "run.toml").read_text() == Path(toml).read_text()


@pytest.mark.parametrize("command", ["sft", "inference", "env-server", "orchestrator", "trainer", "eval"])
def test_a_process_command_needs_a_config(tmp_path: Path, command: str) -> None:
    assert_one_line(moorage(tmp_path, command), "needs a config file")
    assert_one_line(moorage(tmp_path, command, "@", "none.json"), "none.json")
    assert "usage: moorage" in moorage(tmp_path, command, "--help").stdout


def test_env_server_check_loads_the_environment_or_says_why_not(tmp_path: Path, dense_model: Path) -> None:
    run = write_run(tmp_path, dense_model)
    assert moorage(tmp_path, "rl", "@", run, "--dry-run").returncode == 0
    (config,) = (tmp_path / "runs" / "run" / "configs" / "envs" / "train").iterdir()
    done = moorage(tmp_path, "env-server", "@", str(config), "--check")
    assert done.returncode == 0, done.stderr
    assert "loads" in done.stdout
    bad = moorage(tmp_path, "env-server", "@", str(config), "--check", "--source.env.taskset.no_key", "3")
    assert_one_line(bad, "no_key")


def test_ledger_reads_a_run_or_says_what_it_needs(tmp_path: Path) -> None:
    assert_one_line(moorage(tmp_path, "ledger"), "needs one run folder")
    assert_one_line(moorage(tmp_path, "ledger", "none"), "none", "not a run folder")
    assert_one_line(moorage(tmp_path, "ledger", ".", "--limit", "x"), "--limit needs a number")
    assert "usage" in moorage(tmp_path, "ledger", "--help").stdout
