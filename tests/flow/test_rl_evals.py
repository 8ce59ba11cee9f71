"""Measuring during a real run: at the steps that are due, always the same tasks (R26)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moorage.core.rundir import RunDir
from tests.flow.jobs import run_job

STEPS, NUM_TASKS = 3, 6
SOURCE = """
[[orchestrator.eval.sources]]
name = "held_out"
num_tasks = {num_tasks}
interval = 3
num_workers = 1
env = {{ taskset = {{ id = "moorage.tasksets.reverse_text", seed = 1 }} }}
"""


def measured(run: RunDir, version: int) -> list[int]:
    lines = run.traces(version, "eval", "all").read_text().splitlines()
    return sorted(json.loads(line)["task"]["data"]["idx"] for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_and_the_last_policy_are_measured_on_the_same_tasks(
    tmp_path: Path, dense_model: Path
) -> None:
    more = tmp_path / "eval.toml"
    more.write_text(SOURCE.format(num_tasks=NUM_TASKS))
    job = run_job(tmp_path, dense_model, "@", str(more), max_steps=STEPS)
    rows = [row for row in job.metrics("orchestrator") if "eval/held_out/policy_version" in row]
    assert [(row["step"], row["eval/held_out/policy_version"]) for row in rows] == [(0, 0), (STEPS, STEPS)]
    assert all(row["eval/held_out/num_episodes"] == NUM_TASKS for row in rows)
    assert measured(job.run, 0) == measured(job.run, STEPS) == list(range(NUM_TASKS))
    summary = job.summary()
    assert sorted(int(step) for step in summary["eval"]["held_out"]) == [0, STEPS]
    assert (summary["payload"]["outstanding"], summary["payload"]["double_frees"]) == (0, 0)
