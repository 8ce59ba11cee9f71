"""Rollouts' folders: in memory for agents that write nothing, gone at the end, whoever was killed before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime, make_runtime
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


def test_a_rollouts_folder_goes_with_it_empty_or_not(tmp_path: Path) -> None:
    async def live(name: str, *, writes: bool) -> Path:
        runtime = make_runtime(SubprocessConfig(), name)
        await runtime.start()
        if writes:
            await runtime.write("notes/a.txt", b"text")
        await runtime.teardown()
        return Path(runtime.info.id)  # type: ignore[arg-type]

    env = load_env(resolve_env(CHAT, "train")[0])
    thorough = SubprocessRuntime.teardown
    with scratch(env, tmp_path):
        for writes in (False, True):
            folder = asyncio.run(live(f"one-{writes}", writes=writes))
            assert folder.parent.is_dir()
            assert not folder.exists()
    assert SubprocessRuntime.teardown is thorough


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
