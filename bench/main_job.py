"""The main job with moorage and with TRL: same starter model, tasks, 16 x 8 episodes a step, and reward.

    python bench/main_job.py --model runs/starter --trl-python PATH/TO/VENV/bin/python [--steps 30]

moorage runs as it always does, in processes of its own; TRL's GRPO trainer runs in one process, in an
environment of its own (`pip install trl`; the option or MOORAGE_TRL_PYTHON names its Python). One after the
other, so that they do not share cores. Printed for each: total seconds, median seconds per step, reward of
the first step and of the last three, peak memory; for moorage also where a step goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

EXAMPLE = Path(__file__).parents[1] / "examples" / "reverse_text" / "rl.toml"
TRL_SCRIPT = Path(__file__).with_name("trl_grpo.py")
STAGES = ("time/wait_for_batch", "time/fetch", "time/forward_backward", "time/publish", "time/step")


@dataclass(frozen=True)
class Result:
    """One side's figures. `step_s`: median without the first step, which carries start-up work."""

    name: str
    total_s: float
    step_s: float
    reward_first: float
    reward_last: float
    peak_mib: float


class PeakMemory:
    """Highest sum of resident memory of a process and its descendants, sampled every half second."""

    def __init__(self, pid: int) -> None:
        self.peak_mib = 0.0
        self._root = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            total = 0
            try:
                for process in (self._root, *self._root.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.Error:
                continue
            self.peak_mib = max(self.peak_mib, total / 2**20)

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.peak_mib


def run_timed(command: list[str], log: Path) -> tuple[float, float]:
    """Seconds and peak memory of a command that has to succeed."""
    began = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        memory = PeakMemory(process.pid)
        code = process.wait()
    peak_mib = memory.stop()
    if code:
        raise SystemExit(f"{command[0]} ended with code {code}:\n{log.read_text()[-3000:]}")
    return time.perf_counter() - began, peak_mib


def bench_moorage(model: Path, steps: int, seed: int, folder: Path) -> tuple[Result, dict[str, float]]:
    """The example run, and the median seconds of each stage of a step."""
    command = [sys.executable, "-m", "moorage.cli.main", "rl", "@", str(EXAMPLE)]
    command += ["--model.path", str(model), "--max_steps", str(steps), "--seed", str(seed)]
    command += ["--output_dir", str(folder), "--name", "moorage"]
    total_s, peak_mib = run_timed(command, folder / "moorage.log")
    run = folder / "moorage"
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics" / "trainer.jsonl").read_text().splitlines()]
    stages = {
        stage: statistics.median(line[stage] for line in lines[1:] if stage in line) for stage in STAGES
    }
    times = [line["time"] for line in lines]
    steps_s = [after - before for before, after in itertools.pairwise(times)]
    first, last = summary["reward_first"], summary["reward_last"]
    return Result("moorage", total_s, statistics.median(steps_s), first, last, peak_mib), stages


def bench_trl(python: str, model: Path, steps: int, seed: int, folder: Path) -> Result:
    """TRL's GRPO trainer with the recipe of the example."""
    out = folder / "trl.json"
    arguments = [str(model), str(steps), str(seed), str(out), str(folder / "trl")]
    total_s, peak_mib = run_timed([python, str(TRL_SCRIPT), *arguments], folder / "trl.log")
    measured: dict[str, Any] = json.loads(out.read_text())
    rewards, step_times = measured["rewards"], measured["step_times"]
    steps_s = [after - before for before, after in itertools.pairwise(step_times)]
    return Result(
        "TRL", total_s, statistics.median(steps_s), rewards[0], statistics.fmean(rewards[-3:]), peak_mib
    )


def print_results(results: list[Result], stages: dict[str, float]) -> None:
    head = f"{'':10}{'total s':>10}{'s/step':>10}{'reward':>18}{'peak MiB':>12}"
    print(head)
    for r in results:
        reward = f"{r.reward_first:.2f} -> {r.reward_last:.2f}"
        print(f"{r.name:10}{r.total_s:>10.1f}{r.step_s:>10.3f}{reward:>18}{r.peak_mib:>12.0f}")
    if len(results) == 2:
        ours, theirs = results
        total, step = ours.total_s / theirs.total_s, ours.step_s / theirs.step_s
        print(f"moorage / TRL: total {total:.2f}, step {step:.2f}")
    print("moorage, median seconds of a step at the trainer:")
    for stage, seconds in stages.items():
        print(f"  {stage.removeprefix('time/'):20}{seconds:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the starter model")
    parser.add_argument("--trl-python", default=os.environ.get("MOORAGE_TRL_PYTHON"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="main-job-") as name:
        folder, model = Path(name), options.model.resolve()
        ours, stages = bench_moorage(model, options.steps, options.seed, folder)
        results = [ours]
        if options.trl_python:
            results.append(bench_trl(options.trl_python, model, options.steps, options.seed, folder))
        else:
            print("no --trl-python and no MOORAGE_TRL_PYTHON: TRL is left out", file=sys.stderr)
        print_results(results, stages)


if __name__ == "__main__":
    main()
