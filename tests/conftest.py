"""Fixtures shared by all tests. Heavy imports stay inside the fixtures that need them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a randomly initialised starter model (Qwen3, 0.4M parameters)."""
    from moorage.trainer.starter import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("dense") / "model", "qwen3")


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a randomly initialised mixture-of-experts starter model (Qwen3-MoE, 0.5M parameters)."""
    from moorage.trainer.starter import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


@pytest.fixture
def hang_ups_are_heard() -> Iterator[None]:
    """SIGHUP as a terminal's children have it. Under nohup, and under some CI, it comes ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
