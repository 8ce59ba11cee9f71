"""The warm-up as a real process: it makes, trains and saves a model that loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.training import process_env


def _sft(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "sft.toml"
    config.write_text(
        f'output = "{tmp_path / "out"}"\nmax_steps = 4\nbatch_size = 8\nlog_interval = 2\n'
        '[taskset]\nid = "moorage.tasksets.reverse_text"\n'
    )
    command = [sys.executable, "-m", "moorage.cli.main", "sft", "@", str(config), *options]
    return subprocess.run(
        command, env=process_env(), capture_output=True, text=True, timeout=180, check=False
    )


def test_a_starter_model_is_made_warmed_up_and_saved_whole(tmp_path: Path) -> None:
    done = _sft(tmp_path, "--init.architecture", "qwen3_moe")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", done.stderr)]
    assert len(losses) == 2
    assert "step 4/4" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "qwen3_moe"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not list(tmp_path.glob(".out*"))
    again = _sft(tmp_path, "--init.architecture", "qwen3_moe")
    assert again.returncode != 0
    assert "already holds a model" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_a_gradient_that_is_no_number_ends_the_warm_up_and_saves_nothing(tmp_path: Path) -> None:
    done = _sft(tmp_path, "--init.architecture", "qwen3", "--optimizer.lr", "1e38")
    assert done.returncode == 1, done.stderr[-3000:]
    assert re.search(r"TrainingError: step 2: the loss is \S+ and the gradient norm (inf|nan);", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
