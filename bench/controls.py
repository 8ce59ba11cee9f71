"""The controls of the main job: is it the reward that makes the reward climb?

    python bench/controls.py [--config examples/reverse_text/rl.toml] [--steps 30] [--seeds 0]
                             [--kinds real lr0 random]

Runs `moorage rl` with the real reward, with learning rate 0, and with rewards drawn at random, and prints the
mean reward of the first step and of the last three of each. Expected: the real run climbs above 0.75, the
others stay where they began or fall. With learning rate 0 the largest mismatch KL must be below 1e-6: engine
and trainer then hold the same weights, so they must agree on every log-probability. Exit code 1 when one does
not do what is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, list[str]] = {
    "real": [],
    "lr0": ["--trainer.optimizer.lr", "0"],
    "random": ["--orchestrator.algorithm", '{"type": "bench.random_credit:RandomGrpo"}'],
}
RISE = 0.15  # a control that gains this much has learnt something


def run_control(kind: str, config: str, steps: int, seed: int, scratch: Path) -> dict[str, Any]:
    """One run; returns its summary. Raises SystemExit when it fails."""
    name = f"{kind}-{seed}"
    options = ["--name", name, "--output_dir", str(scratch), "--max_steps", str(steps)]
    options += ["--seed", str(seed)]
    command = [sys.executable, "-m", "moorage.cli.main", "rl", "@", config, *options, *KINDS[kind]]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"control {name} ended with code {done.returncode}")
    return json.loads((scratch / name / "summary.json").read_text())


def judge(kind: str, summary: dict[str, Any]) -> str | None:
    """What is not as expected, or None."""
    first, last = summary["reward_first"], summary["reward_last"]
    if kind == "real":
        return None if last > first + RISE else f"the real reward did not climb: {first:.2f} to {last:.2f}"
    if last > first + RISE:
        return f"reward climbed without a reason: {first:.2f} to {last:.2f}"
    if kind == "lr0" and max(summary["mismatch_kl"]) >= 1e-6:
        return f"engine and trainer disagree: mismatch KL {max(summary['mismatch_kl']):.2e}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "examples" / "reverse_text" / "rl.toml"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            for kind in args.kinds:
                summary = run_control(kind, args.config, args.steps, seed, Path(scratch))
                figures = {
                    "control": kind,
                    "seed": seed,
                    "reward_first": round(summary["reward_first"], 3),
                    "reward_last_three": round(summary["reward_last"], 3),
                    "mismatch_kl_max": max(summary["mismatch_kl"]),
                }
                print(json.dumps(figures), flush=True)
                if (problem := judge(kind, summary)) is not None:
                    wrong.append(f"{kind}, seed {seed}: {problem}")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
