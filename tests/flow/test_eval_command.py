"""`moorage eval` from the command line: a checkpoint folder, Ctrl-C half-way, and the same command again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from verifiers.v1 import WireTrace
from verifiers.v1.utils.trace_store import read_episodes

from moorage.core.rundir import RunDir
from tests.flow.jobs import started_by, wait_until

NUM_TASKS, GROUP_SIZE = 150, 2
TOTAL = NUM_TASKS * GROUP_SIZE
TOML = f"""
name = "{{name}}"
group_size = {GROUP_SIZE}
max_inflight = 4
seq_len = 64
[model]
path = "{{model}}"
[sampling]
temperature = 0.0
max_tokens = 12
[[sources]]
name = "letters"
num_tasks = {NUM_TASKS}
num_workers = 1
env = {{{{ taskset = {{{{ id = "moorage.tasksets.reverse_text" }}}} }}}}
"""


@dataclass
class Command:
    """A started `moorage eval`, and its folder."""

    run: RunDir
    process: subprocess.Popen[str]

    def finish(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=180)
        finally:
            self.process.kill()
        assert not started_by(self.process.pid)
        return self.process.returncode, out, err

    @property
    def lines(self) -> int:
        path = self.run.traces(0, "eval", "all")
        return path.read_bytes().count(b"\n") if path.exists() else 0


def start(folder: Path, model: Path, name: str) -> Command:
    toml = folder / f"{name}.toml"
    toml.write_text(TOML.format(name=name, model=model))
    command = [sys.executable, "-m", "moorage.cli.main", "eval", "@", str(toml)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True
    )
    return Command(RunDir(folder / "evals" / name), process)


def figures(run: RunDir) -> dict[str, float]:
    values = json.loads((run.root / "results.json").read_text())["letters"]
    return {name: value for name, value in values.items() if "timing" not in name}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_evaluation_goes_on_and_ends_with_the_table_of_a_whole_one(
    tmp_path: Path, dense_model: Path
) -> None:
    code, whole, err = start(tmp_path, dense_model, "whole").finish()
    assert code == 0, err
    assert f"{TOTAL}/{TOTAL} episodes" in err

    halves = start(tmp_path, dense_model, "halves")
    wait_until(lambda: halves.lines >= TOTAL // 3 or halves.process.poll() is not None, 120.0)
    halves.process.send_signal(signal.SIGINT)
    code, out, err = halves.finish()
    assert (code, out) == (130, "")
    assert "the same command measures what is missing" in err
    assert "Traceback" not in err
    there = halves.lines
    assert TOTAL // 3 <= there < TOTAL

    again = start(tmp_path, dense_model, "halves")
    code, out, err = again.finish()
    assert code == 0, err
    assert out == whole
    assert f"{there} episodes are there already" in err
    episodes = read_episodes(again.run.traces(0, "eval", "all").parent, WireTrace)
    assert len({episode.id for episode in episodes}) == len(episodes) == TOTAL
    assert figures(again.run) == figures(RunDir(tmp_path / "evals" / "whole"))
