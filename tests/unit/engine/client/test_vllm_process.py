"""`moorage inference` with `backend = "vllm"`, as a process, around a child that behaves in every bad way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moorage.config.engine import InferenceConfig
from moorage.config.model import ModelConfig
from moorage.config.run import InferenceProcessConfig
from moorage.core.net import find_free_port
from moorage.core.rundir import RunDir

LIKE = Path(__file__).parent / "vllm_like.py"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An executable that takes itself for a Python with vLLM."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{LIKE}" "$@"\n')
    path.chmod(0o755)
    return path


def start(
    folder: Path, python: Path, dense_model: Path, behaviour: str, **inference: object
) -> subprocess.Popen:
    config = InferenceProcessConfig(
        inference=InferenceConfig(
            backend="vllm",
            python=str(python),
            port=find_free_port(),
            dtype="float32",
            **inference,  # type: ignore[arg-type]
        ),
        model=ModelConfig(path=str(dense_model)),
        run_dir=str(folder / "run"),
    )
    path = folder / "inference.json"
    path.write_text(config.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", "inference", "@", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "VLLM_LIKE": behaviour, "MOORAGE_TOKEN": "secret", "PYTHONPATH": ""},
        start_new_session=True,
    )


def read_until(process: subprocess.Popen, what: str) -> str:
    """Output up to the line that holds `what`."""
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if what in line:
            return text
    raise AssertionError(f"{what!r} never came:\n{text}")


def test_it_serves_until_sigterm_and_takes_the_child_along(
    tmp_path: Path, python: Path, dense_model: Path
) -> None:
    process = start(tmp_path, python, dense_model, "serve")
    text = read_until(process, "vLLM is ready at http://127.0.0.1:")
    child = int(re.search(r"PID (\d+)", text).group(1))  # type: ignore[union-attr]
    env = json.loads(re.search(r"ENV (\{.*\})", text).group(1))  # type: ignore[union-attr]
    assert env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "MOORAGE_TOKEN": None,
        "PYTHONPATH": None,
        "VLLM_CPU_KVCACHE_SPACE": None,
    }
    assert "INFO loading part 2" in text
    assert "--enable-scale-out" in text
    assert (RunDir(tmp_path / "run").alive / "inference.json").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert not psutil.pid_exists(child)
    process.communicate()


@pytest.mark.parametrize(
    ("behaviour", "options", "error"),
    [
        ("die", {}, "vLLM ended with code 1 before it was ready: ValueError: no such attention backend"),
        ("hang", {"ready_timeout_s": 1.5}, "was not ready in time (inference.ready_timeout_s)"),
        ("fall", {}, "vLLM ended with code 9: torch.OutOfMemoryError: no room for the cache"),
    ],
)
def test_a_server_that_fails_ends_the_process_with_the_cause_and_the_log_tail(
    tmp_path: Path, python: Path, dense_model: Path, behaviour: str, options: dict[str, float], error: str
) -> None:
    process = start(tmp_path, python, dense_model, behaviour, **options)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error in text.splitlines()[-1]
    assert "---- last lines of vLLM ----" in text
    assert text.count("INFO loading part 2") >= 2, "passed on as it came, and shown again at the end"
    child = int(re.search(r"PID (\d+)", text).group(1))  # type: ignore[union-attr]
    assert not psutil.pid_exists(child)


def test_the_server_does_not_outlive_a_process_that_was_killed(
    tmp_path: Path, python: Path, dense_model: Path
) -> None:
    process = start(tmp_path, python, dense_model, "serve")
    child = int(re.search(r"PID (\d+)", read_until(process, "is ready at")).group(1))  # type: ignore[union-attr]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, python: Path, dense_model: Path) -> None:
    process = start(tmp_path, python, dense_model, "deaf")
    child = int(re.search(r"PID (\d+)", read_until(process, "is ready at")).group(1))  # type: ignore[union-attr]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert not psutil.pid_exists(child)
    process.communicate()


@pytest.mark.parametrize(
    ("python_text", "error"),
    [
        (None, "there is no "),
        ("#!/bin/sh\nexit 3\n", "has no vLLM installed"),
    ],
)
def test_an_environment_without_vllm_is_one_clear_line(
    tmp_path: Path, dense_model: Path, python_text: str | None, error: str
) -> None:
    python = tmp_path / "other" / "python"
    if python_text is not None:
        python.parent.mkdir()
        python.write_text(python_text)
        python.chmod(0o755)
    process = start(tmp_path, python, dense_model, "serve")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert text.startswith("moorage: error: inference.python: ")
    assert error in text
    assert text.count("\n") == 1


def test_a_cpu_engine_needs_a_cpu_build(tmp_path: Path, python: Path, dense_model: Path) -> None:
    process = start(tmp_path, python, dense_model, "serve", device="cpu")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "holds vLLM 0.33.0, no CPU build" in text
