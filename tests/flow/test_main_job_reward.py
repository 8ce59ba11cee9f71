"""The example as it is shipped: a starter model is warmed up, then improved (R31)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reverse_text"
FIRST_BELOW, LAST_ABOVE = 0.45, 0.75
WORDS = ("garden", "lemon", "quartz", "mostly", "viper", "hazel", "joking", "tundra")


def moorage(folder: Path, *args: str) -> None:
    command = [sys.executable, "-m", "moorage.cli.main", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def run_example(folder: Path, seed: int) -> dict[str, Any]:
    """Both files of the example with a seed; the summary."""
    moorage(folder, "sft", "@", str(EXAMPLE / "sft.toml"), "--seed", str(seed))
    assert_knows_the_skill(folder / "runs" / "starter")
    moorage(folder, "rl", "@", str(EXAMPLE / "rl.toml"), "--seed", str(seed))
    return json.loads((folder / "runs" / "reverse_text" / "summary.json").read_text())


def assert_knows_the_skill(model_folder: Path) -> None:
    """With a system turn the starter model reverses most words: what reinforcement learning has to
    bring out is there."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    right = 0
    for word in WORDS:
        chat = [{"role": "system", "content": ""}, {"role": "user", "content": word}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += answer == word[::-1]
    assert right >= 5


def assert_improved(summary: dict[str, Any]) -> None:
    assert summary["status"] == "finished"
    assert summary["steps"] == 30
    assert summary["reward_first"] < FIRST_BELOW
    assert summary["reward_last"] > LAST_ABOVE
    assert summary["episodes"]["errored"] == 0
    payload = summary["payload"]
    assert payload["kept"] == sum(payload["freed"].values())
    assert payload["outstanding"] == payload["double_frees"] == payload["dropped_micro_batches"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_improves_its_reward(tmp_path: Path) -> None:
    assert_improved(run_example(tmp_path, 0))


@pytest.mark.proof
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_example_improves_its_reward_with_every_seed(tmp_path: Path, seed: int) -> None:
    assert_improved(run_example(tmp_path, seed))


@pytest.mark.proof
@pytest.mark.timeout(3000)
def test_a_fresh_clone_needs_nothing_but_the_first_command(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    ignore = shutil.ignore_patterns(".venv*", "runs", ".git", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=ignore)
    env = {name: value for name, value in os.environ.items() if name not in ("VENV", "VIRTUAL_ENV")}
    env["PYTHON"] = sys.executable
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh"], cwd=clone, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert_improved(json.loads((clone / "runs" / "reverse_text" / "summary.json").read_text()))
