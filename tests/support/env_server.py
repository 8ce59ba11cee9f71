"""Start a real env server as a process of its own and talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moorage.env.client import EnvClient, RolloutCall
from moorage.env.protocol import LEASE_S

ROOT = Path(__file__).parents[2]
ENVS = Path(__file__).parent / "envs"
TOKEN = "00112233445566778899aabbccddeeff" * 2
RUN_ID = "test-run"
_MAIN = """
import sys
from pathlib import Path
from moorage.config.base import load_config
from moorage.config.env import EnvServerConfig
from moorage.core.errors import MoorageError
from moorage.env.process import main
try:
    code = main(load_config(EnvServerConfig, Path(sys.argv[1])), lease_s=float(sys.argv[2]))
except MoorageError as error:
    print(error, file=sys.stderr)
    code = 2
sys.exit(code)
"""


@dataclass
class Server:
    """A running env server."""

    process: subprocess.Popen[bytes]
    address: dict[str, Any]
    folder: Path
    log: Path
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def rpc(self) -> str:
        return self.address["rpc"]

    def client(
        self, *, attempt: int = 1, run_id: str = RUN_ID, token: str = TOKEN, source: str = "train/nothing"
    ):
        return EnvClient(self.rpc, token=token, run_id=run_id, attempt=attempt, source=source)

    def worker_pids(self) -> list[int]:
        """Processes forked from the nursery, the first started first."""
        for child in psutil.Process(self.process.pid).children():
            if "moorage.env.nursery" in " ".join(child.cmdline()):
                return sorted(worker.pid for worker in child.children())
        return []

    def stop(self, timeout_s: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def call(
    action: str = "nothing",
    seconds: float = 0.0,
    *,
    deadline_s: float = 60.0,
    endpoint: str = "http://127.0.0.1:9",
    **fields: Any,
) -> RolloutCall:
    """A run of the do-nothing environment."""
    task = {"data": {"prompt": "do", "action": action, "seconds": seconds, **fields}}
    return RolloutCall(task, "policy", endpoint, 0, {"temperature": 1.0}, deadline_s)


def server_config(
    folder: Path,
    model_path: Path | str,
    *,
    num_workers: int = 1,
    max_concurrent: int = 256,
    num_tasks: int | None = 50,
    split: str = "train",
    run_id: str = RUN_ID,
    taskset: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The config file of a server of the do-nothing environment."""
    source: dict[str, Any] = {
        "name": "nothing",
        "env": {"taskset": {"id": "do_nothing", "num_tasks": num_tasks, **(taskset or {})}},
        "num_workers": num_workers,
        "max_concurrent": max_concurrent,
    }
    source.update(fields.pop("source", {}))
    return {
        "source": source,
        "split": split,
        "model_path": str(model_path),
        "run_dir": str(folder),
        "run_id": run_id,
        "spool_dir": str(folder / "spool"),
        **fields,
    }


@contextlib.contextmanager
def env_server(
    folder: Path,
    model_path: Path | str,
    *,
    timeout_s: float = 240.0,
    lease_s: float = LEASE_S,
    **fields: Any,
) -> Iterator[Server]:
    """A server of the do-nothing environment, ended (by force if need be) on the way out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = server_config(folder, model_path, **fields)
    path = folder / "env.json"
    path.write_text(json.dumps(config))
    log = folder / "server.log"
    environ = {**os.environ, "MOORAGE_TOKEN": TOKEN, "PYTHONPATH": f"{ENVS}:{ROOT}", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(path), str(lease_s)], env=environ, stdout=out, stderr=out
        )
    try:
        yield Server(process, _wait_address(folder, process, log, timeout_s), folder, log, config)
    finally:
        end_tree(process)


def _wait_address(
    folder: Path, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in folder.glob("envs/*/*.address"):
            return json.loads(path.read_text())
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the env server did not start (exit code {process.poll()}):\n{log.read_text()}")


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a server that a test left running, and what it started."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
