"""Run folders before an attempt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.config.run import CheckpointConfig
from moorage.core.errors import ConfigError
from moorage.core.rundir import (
    RunDir,
    checkpoint_steps,
    mark_ready,
    ready_steps,
    whole_checkpoints,
    write_end,
    write_json_atomic,
)
from moorage.exchange.batches import read_checkpoint_state, write_state
from moorage.launcher import resume
from moorage.monitor.files import FileMonitor, read_metrics


def write_rows(run: RunDir, process: str, steps: list[int], **values: float) -> None:
    monitor = FileMonitor(run.metrics(process))
    for step in steps:
        monitor.log(values, step)
    monitor.close()


def steps_in(run: RunDir, process: str) -> list[int]:
    return [row["step"] for row in read_metrics(run.metrics(process))]


def make_run(tmp_path: Path, *, checkpoints: tuple[int, ...] = (), half: tuple[int, ...] = ()) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    facts = {"facts": {"run_id": "abc", "attempt": 2}}
    write_json_atomic(run.configs / "orchestrator.json", facts)
    for step in range(1, 7):
        mark_ready(run.weight(step))
        write_state(run.batch(step), f"state {step}".encode())
        for split in ("train", "eval"):
            run.traces(step, split, "all").parent.mkdir(parents=True)
    for step in checkpoints:
        mark_ready(run.checkpoint(step, "trainer"))
        mark_ready(run.checkpoint(step, "orchestrator"))
    for step in half:
        mark_ready(run.checkpoint(step, "trainer"))
    write_end(run, "failed", "x")
    (run.envs / "train").mkdir(parents=True)
    (run.envs / "train" / "a.node.address").write_text("{}")
    return run


def test_a_dry_run_leaves_a_folder_that_may_be_started(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    write_json_atomic(run.configs / "trainer.json", {})
    run.run_toml.write_text("")
    assert not resume.holds_run(run)
    write_end(run, "finished")
    assert resume.holds_run(run)


def test_the_resume_point_is_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(2, 4), half=(6,))
    assert resume.resume_facts(run) == ("abc", 3, 4)


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        resume.resume_facts(make_run(tmp_path, half=(6,)))
    with pytest.raises(ConfigError, match="holds no run"):
        resume.resume_facts(RunDir(tmp_path / "other"))


def test_cleaning_removes_later_steps_and_signs_of_life(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(4,), half=(6,))
    resume.clean_after(run, 4, keep_batches=False)
    assert sorted(p.name for p in run.weights.iterdir()) == [f"step_{n}" for n in range(1, 5)]
    assert sorted(p.name for p in run.batches.iterdir()) == [f"step_{n}" for n in range(1, 5)]
    assert not (run.root / "episodes" / "step_5").exists()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step_4"]
    assert not run.end.exists()
    assert not list(run.envs.rglob("*.address"))


def test_with_retained_batches_the_orchestrators_later_work_stays_and_the_trainers_goes(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, checkpoints=(4,), half=(5,))
    assert resume.clean_after(run, 4, keep_batches=True) == 6
    assert ready_steps(run.batches) == [1, 2, 3, 4, 5, 6]
    assert ready_steps(run.weights) == [1, 2, 3, 4]
    assert [p.name for p in run.checkpoints.iterdir()] == ["step_4"]
    assert run.traces(6, "train", "all").parent.exists()
    assert not run.traces(5, "eval", "all").parent.exists()  # version 5 comes again, and is measured again
    assert run.traces(4, "eval", "all").parent.exists()


@pytest.mark.parametrize("crash", ["before_the_part", "after_the_part"])
def test_each_kept_batch_of_a_checkpoint_has_its_orchestrator_part(tmp_path: Path, crash: str) -> None:
    """Nobody ships a kept batch again, so nobody else would write the part, and 6 would never be whole."""
    run = make_run(tmp_path, checkpoints=(2, 4))
    if crash == "after_the_part":
        write_state(run.checkpoint(6, "orchestrator"), b"state 6")
    shipped = resume.clean_after(run, 4, keep_batches=True)
    resume.write_parts(run, 4, shipped, CheckpointConfig(interval=2), last_step=20)
    assert checkpoint_steps(run) == [2, 4, 6]
    assert read_checkpoint_state(run.checkpoint(6, "orchestrator")) == b"state 6"
    assert whole_checkpoints(run) == [2, 4]  # the trainer's part is its own to write


def test_a_kept_batch_of_the_last_step_has_its_orchestrator_part(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(4,))
    resume.write_parts(run, 4, 6, CheckpointConfig(interval=4), last_step=5)
    assert checkpoint_steps(run) == [4, 5]


def test_rows_of_what_is_done_again_go(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(4,))
    write_rows(run, "trainer", [1, 2, 3, 4, 5, 6], loss=0.1)
    write_rows(run, "orchestrator", [1, 2, 3, 4, 5, 6, 7], started=0.1)
    with run.metrics("trainer").open("ab") as file:
        file.write(b'{"step": 7, "ti')
    before = read_metrics(run.metrics("trainer"))
    resume.clean_after(run, 4, keep_batches=False)
    assert read_metrics(run.metrics("trainer")) == before[:4]
    assert steps_in(run, "orchestrator") == [1, 2, 3, 4]


def test_rows_of_kept_batches_stay_but_for_measurements_of_versions_that_come_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(4,))
    write_rows(run, "trainer", [1, 2, 3, 4, 5], loss=0.1)
    write_rows(run, "orchestrator", [3, 4, 5, 6, 7], started=0.1)
    write_rows(run, "orchestrator", [4, 5], **{"eval/words/reward/mean": 0.5})
    resume.clean_after(run, 4, keep_batches=True)
    assert steps_in(run, "trainer") == [1, 2, 3, 4]
    assert steps_in(run, "orchestrator") == [3, 4, 5, 6, 4]


def test_retained_batches_behind_a_gap_go(tmp_path: Path) -> None:
    """An attempt that did not retain its batches deleted the first of them: nobody could train the others."""
    run = make_run(tmp_path, checkpoints=(3,))
    shutil.rmtree(run.batch(4))
    resume.clean_after(run, 3, keep_batches=True)
    assert ready_steps(run.batches) == [1, 2, 3]


def test_clean_removes_only_what_lies_below_the_output_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="does not lie below"):
        resume.remove_run(run, tmp_path / "elsewhere")
    resume.remove_run(run, tmp_path / "runs")
    assert not resume.holds_run(run)


def test_a_second_launcher_is_kept_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with resume.hold(run), pytest.raises(ConfigError, match="running this run now"), resume.hold(run):
        pass
    with resume.hold(run):
        pass


def test_processes_of_an_earlier_attempt_are_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "moorage"])
    try:
        write_json_atomic(run.alive / "trainer.json", {"process": "trainer", "pid": child.pid, "time": 0})
        with pytest.raises(ConfigError, match=f"trainer \\(pid {child.pid}\\)"):
            resume.wait_for_leavers(run, within_s=0.5)
    finally:
        child.kill()
        child.wait()
    resume.wait_for_leavers(run)
    (run.alive / "trainer.json").write_text(json.dumps({"pid": os.getpid()}))
    resume.wait_for_leavers(run)
