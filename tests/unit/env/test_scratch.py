"""Rollouts' folders: in memory for agents that write nothing, gone at the end, whoever was killed before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from verifiers.v1.runtimes import SubprocessConfig, make_runtime
from verifiers.v1.runtimes import subprocess as runtimes

from moorage.env.resolve import load_env, resolve_env
from moorage.env.scratch import PREFIX, scratch
from tests.support import player  # noqa: F401 - puts the test environments on the path

CHAT = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
CODE = {"taskset": {"id": "programs"}, "agent": {"runtime": {"type": "subprocess"}}}


def test_folders_of_chat_rollouts_are_in_the_scratch_folder_and_go_with_it(tmp_path: Path) -> None:
    env = load_env(resolve_env(CHAT, "train")[0])
    before = runtimes.CACHE_DIR
    with scratch(env, tmp_path) as folder:
        assert folder is not None
        runtime = make_runtime(SubprocessConfig(), "one")
        asyncio.run(runtime.start())
        assert folder in Path(runtime.info.id).parents  # type: ignore[arg-type]
    assert before == runtimes.CACHE_DIR
    assert list(tmp_path.iterdir()) == []


def test_agents_that_execute_code_keep_their_place(tmp_path: Path) -> None:
    env = load_env(resolve_env(CODE, "train")[0])
    before = runtimes.CACHE_DIR
    with scratch(env, tmp_path) as folder:
        assert folder is None
        assert before == runtimes.CACHE_DIR
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for process in (gone, living):
            (tmp_path / f"{PREFIX}{process.pid}-x" / "runtimes").mkdir(parents=True)
        with scratch(load_env(resolve_env(CHAT, "train")[0]), tmp_path):
            assert not (tmp_path / f"{PREFIX}{gone.pid}-x").exists()
            assert (tmp_path / f"{PREFIX}{living.pid}-x").exists()
    finally:
        living.kill()
        living.wait()
