"""`moorage inference` with `backend = "vllm"`: a vLLM server as a child process.

Owns the child. Promises:

- vLLM is started from its own environment (`inference.python`, else the `vllm` on the PATH), never imported;
- its output is passed on to this process's log; when it is not ready in time, or ends, its last lines are
  shown and this process ends with an error;
- SIGTERM is passed on and is an orderly stop with code 0; the server never outlives this process.

Does not know what requests the server answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from types import FrameType

import psutil

from moorage.config.engine import InferenceConfig
from moorage.config.model import is_mixture_of_experts
from moorage.config.run import InferenceProcessConfig
from moorage.core.errors import ConfigError, EngineError
from moorage.core.log import get_logger, setup_logging
from moorage.core.net import advertised_host, find_free_port, format_url
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, RunDir
from moorage.core.secret import TOKEN_VARIABLE
from moorage.engine.launch import LaunchLine, make_launch_line

log = get_logger(__name__)

TAIL_LINES = 40
ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception): ")
STOP_TIMEOUT_S = 20.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PR_SET_PDEATHSIG = 1


def main(config: InferenceProcessConfig) -> int:
    """Serve until SIGTERM. Raises ConfigError or EngineError when vLLM cannot start or ends by itself."""
    setup_logging(config.name)
    engine = config.inference.model_copy(update={"python": find_python(config.inference)})
    is_moe, version = _describes_experts(config.model.path), installed_version(str(engine.python))
    port = engine.port or find_free_port(engine.host)
    line = make_launch_line(engine, config.model, port=port, is_moe=is_moe, on_cpu="cpu" in version)
    if engine.device == "cpu" and "cpu" not in version:
        raise ConfigError(f"inference.device is cpu, but {engine.python} holds vLLM {version}, no CPU build")
    if engine.host not in LOOPBACK:
        log.warning(
            "vLLM's pause and reload routes cannot be protected: whoever reaches %s can change the "
            "weights; bind it to a private interface only",
            engine.host,
        )
    log.info("starting vLLM %s: %s", version, " ".join(line.argv))
    child = VllmProcess(line)
    watch_parent()
    with _heartbeat(config):
        return child.serve(format_url(advertised_host(engine.host), port), engine.ready_timeout_s)


class VllmProcess:
    """The child, from start to end. Make it in the main thread before other threads exist."""

    def __init__(self, line: LaunchLine) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._first_error: str | None = None
        self._stopping = threading.Event()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._child = subprocess.Popen(
            line.argv,
            env=_child_environment(line),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=self._die_with_parent,  # safe: only this thread exists yet
            text=True,
            errors="replace",
        )
        signal.signal(signal.SIGTERM, self._on_term)
        self._tee = threading.Thread(target=self._pass_on, name="vllm-output", daemon=True)
        self._tee.start()

    def serve(self, url: str, ready_timeout_s: float) -> int:
        """Wait until it is ready, then until it ends. 0 when it was asked to stop."""
        started = time.monotonic()
        try:
            self._wait_ready(url, started + ready_timeout_s)
            self._first_error = None
            if not self._stopping.is_set():
                log.info("vLLM is ready at %s after %.0f s", url, time.monotonic() - started)
            while self._child.poll() is None:
                if self._stopping.wait(0.5):
                    self._stop()
        finally:
            self._stop()
        if self._stopping.is_set():
            return 0
        raise self._failure(f"vLLM ended with code {self._child.returncode}")

    def _wait_ready(self, url: str, deadline: float) -> None:
        while not self._stopping.wait(0.5):
            if self._child.poll() is not None:
                raise self._failure(f"vLLM ended with code {self._child.returncode} before it was ready")
            if _is_healthy(url):
                return
            if time.monotonic() > deadline:
                raise self._failure(f"vLLM at {url} was not ready in time (inference.ready_timeout_s)")

    def _failure(self, what: str) -> EngineError:
        """The error for a server that failed, after showing its last lines."""
        self._tee.join(timeout=2.0)
        lines = list(self._tail)
        sys.stderr.write(f"---- last lines of vLLM ----\n{''.join(lines)}----\n")
        cause = self._first_error or (lines[-1] if lines else "no output")
        return EngineError(f"{what}: {cause.strip()[-400:]}")

    def _stop(self) -> None:
        """SIGTERM, then SIGKILL for it and what it started."""
        if self._child.poll() is not None:
            return
        family = [self._child.pid, *(p.pid for p in psutil.Process(self._child.pid).children(recursive=True))]
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=STOP_TIMEOUT_S)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping.set()

    def _pass_on(self) -> None:
        assert self._child.stdout is not None
        for text in self._child.stdout:
            self._tail.append(text)
            if self._first_error is None and ERROR_LINE.search(text):
                self._first_error = text  # vLLM shows the cause first, then each process that it took along
            sys.stderr.write(text)
            sys.stderr.flush()

    def _die_with_parent(self) -> None:
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def find_python(engine: InferenceConfig) -> str:
    """The Python of vLLM's environment. Raises ConfigError when there is none."""
    if engine.python is not None:
        if not Path(engine.python).is_file():
            raise ConfigError(
                f"inference.python: there is no {engine.python}; name the Python of the environment vLLM is "
                "installed in (docs/vllm.md)"
            )
        return str(
            Path(engine.python).absolute()
        )  # not resolved: the link is what makes it that environment's
    program = shutil.which("vllm")
    if program is None:
        raise ConfigError(
            "inference.backend is vllm, but no `vllm` is on the PATH; set inference.python (docs/vllm.md)"
        )
    return str(Path(program).with_name("python"))


def installed_version(python: str) -> str:
    """The version of vLLM in the environment of `python`. Raises ConfigError when it has none."""
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"inference.python: {python} cannot be run ({error})") from None
    if done.returncode != 0:
        raise ConfigError(f"inference.python: {python} has no vLLM installed (docs/vllm.md)")
    return done.stdout.strip()


def _describes_experts(path: str) -> bool:
    try:
        return is_mixture_of_experts(json.loads((Path(path) / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} is no model folder ({error})") from None


def _heartbeat(config: InferenceProcessConfig) -> contextlib.AbstractContextManager[object]:
    if config.run_dir is None:
        return contextlib.nullcontext()
    return Heartbeat(RunDir(config.run_dir), config.name)


def _child_environment(line: LaunchLine) -> dict[str, str]:
    """Ours, without what belongs to our own Python and without the run's secret."""
    ours = {TOKEN_VARIABLE, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    return {**line.defaults, **inherited, **line.env}


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
