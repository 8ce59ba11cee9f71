"""Ends that nobody may wait beyond: short runs, resume at the last step, nothing left to do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from moorage.core.errors import ConfigError
from moorage.core.net import find_free_port
from moorage.core.rundir import write_json_atomic
from moorage.exchange.batches import read_checkpoint_state
from moorage.orchestrator.loop import main
from moorage.orchestrator.progress import decode_state
from tests.flow.test_orchestrator_run import (
    assert_accounts,
    make_orchestrator,
    make_process_config,
)
from tests.unit.orchestrator.scripted import ScriptedEnv, ScriptedStore, ScriptedTrainer, reply_after


def run_once(root, first: int, last: int, step_s: float, max_ahead: int = 1):
    """One attempt; returns the seconds from the trainer's end to the orchestrator's."""

    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, reply_after(store))
        config = make_process_config(root, last, start_step=first, checkpoint_interval=1, max_ahead=max_ahead)
        state = None
        folder = root / "run" / "checkpoints" / f"step_{first - 1}" / "orchestrator"
        if first > 1:
            state = decode_state(read_checkpoint_state(folder), ("script",))
        orchestrator = make_orchestrator(config, env, state=state)
        trainer = ScriptedTrainer(
            orchestrator.run_dir, store, first=first, last=last, step_s=step_s, checkpoint=1
        )
        done_at = []

        async def train():
            await trainer.run()
            done_at.append(time.monotonic())

        training = asyncio.create_task(train())
        async with asyncio.timeout(60):
            assert await orchestrator.run(asyncio.Event())
            ended = time.monotonic()
            await training
        orchestrator.parts.monitor.close()
        store.assert_clean()
        assert_accounts(orchestrator)
        assert [batch.step for batch in trainer.batches] == list(range(first, last + 1))
        assert (root / "run" / "checkpoints" / f"step_{last}" / "orchestrator" / "READY").exists()
        return ended - done_at[0]

    return asyncio.run(scenario())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_instant_env_and_a_slow_trainer_end_together(tmp_path, steps):
    assert run_once(tmp_path, 1, steps, step_s=0.3) < 5


@pytest.mark.parametrize("max_ahead", [0, 3])
def test_any_overlap_ends(tmp_path, max_ahead):
    assert run_once(tmp_path, 1, 3, step_s=0.05, max_ahead=max_ahead) < 5


def test_resume_at_the_last_step(tmp_path):
    run_once(tmp_path, 1, 2, step_s=0.0)
    assert run_once(tmp_path, 3, 3, step_s=0.1) < 5


def test_nothing_left_to_do_is_a_good_end(tmp_path):
    started = time.monotonic()
    assert main(make_process_config(tmp_path, 3, start_step=4)) == 0
    assert time.monotonic() - started < 5


def test_engines_that_send_no_kept_sets_end_a_run_that_samples_truncated(tmp_path):
    async def scenario():
        store = ScriptedStore()
        config = make_process_config(tmp_path, 1, sampling={"top_k": 5})
        orchestrator = make_orchestrator(config, ScriptedEnv(store, reply_after(store)))
        try:
            async with asyncio.timeout(30):
                await orchestrator.run(asyncio.Event())
        finally:
            orchestrator.parts.monitor.close()

    with pytest.raises(ConfigError, match=r"source `script` came without kept sets"):
        asyncio.run(scenario())


def test_an_engine_that_does_not_come_up_ends_the_process_after_the_time_that_was_set(tmp_path):
    url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
    config = make_process_config(tmp_path, 3, train=[]).model_copy(
        update={"engine_urls": [url], "ready_timeout_s": 0.3}
    )
    path = tmp_path / "orchestrator.json"
    write_json_atomic(path, config.model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-m", "moorage.cli.main", "orchestrator", "@", str(path)],
        env={**os.environ, "MOORAGE_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert f"{url} (not ready within 0.3 s (inference.ready_timeout_s)" in done.stderr
