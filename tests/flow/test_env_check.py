"""`moorage env-server --check` as a person meets it: one episode against a scripted engine (R13, R34)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.scripted_engine import Reply, ScriptedEngine

TOML = """
model_path = "{model}"
run_dir = "served"
[source]
name = "letters"
env = {{ taskset = {{ id = "moorage.tasksets.reverse_text" }} }}
"""


def check(folder: Path, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    config = folder / "env.toml"
    config.write_text(TOML.format(model=model))
    command = [sys.executable, "-m", "moorage.cli.main", "env-server", "--check", "@", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=150)


def test_one_episode_is_played_and_shown(tmp_path: Path, dense_model: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("moorage-check-*"))
    with ScriptedEngine(lambda _: Reply("zyx"), dense_model) as engine:
        done = check(tmp_path, dense_model, "--endpoint", engine.url)
        assert len(engine.seen) == 1
    assert done.returncode == 0, done.stdout + done.stderr
    assert "artifact_max_bytes" not in done.stdout, "only what the environment's author wrote is shown"
    for words in ("task: idx = ", "ok", "assistant: zyx", "rewards:", "trained", "bytes (token_ids"):
        assert words in done.stdout, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.toml"], "it leaves nothing here"
    assert set(Path(tempfile.gettempdir()).glob("moorage-check-*")) <= before


def test_an_engine_that_refuses_is_shown_as_an_episode_that_is_not_ok(
    tmp_path: Path, dense_model: Path
) -> None:
    with ScriptedEngine(lambda _: Reply("no such adapter", status=400), dense_model) as engine:
        done = check(tmp_path, dense_model, "--endpoint", engine.url, "--model", "other")
        assert engine.seen[0].body["model"] == "other"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not ok" in done.stdout
    assert "no such adapter" in done.stdout


def test_options_that_make_no_sense_are_named(tmp_path: Path, dense_model: Path) -> None:
    for options, words in (
        (("--model", "x"), "--endpoint"),
        (("--endpoint",), "--endpoint needs a value"),
        (("--endpoint", "ftp://x"), "ftp://x"),
    ):
        done = check(tmp_path, dense_model, *options)
        assert done.returncode == 2
        assert words in done.stderr
