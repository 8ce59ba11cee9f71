"""The engine and the env servers that `moorage eval` starts as its children.

Promises: each has a log file and a config file in the measurement's folder; the death of one ends the
measurement with its last error; `stop` leaves none behind. Does not know episodes.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

from moorage.config.base import make_config
from moorage.config.env import EnvServerConfig, EvalSourceConfig
from moorage.config.evaluation import EvaluationConfig
from moorage.config.run import InferenceProcessConfig
from moorage.core.errors import EngineError, EnvServerError
from moorage.core.net import find_free_port, node_name
from moorage.core.rundir import RunDir, write_json_atomic
from moorage.launcher import children
from moorage.launcher.plan import ProcessRecord


class Servers:
    """The engine and env servers that this measurement starts, as children with a log file each."""

    def __init__(self, config: EvaluationConfig, run: RunDir, token: str) -> None:
        self.config = config
        self.run = run
        self.token = token
        self.run_id = uuid.uuid4().hex
        self.endpoint = config.endpoint or ""
        self._children: list[children.Child] = []

    def start(self) -> None:
        """Start what is needed; from the main thread."""
        if not self.endpoint:
            port = self.config.inference.port or find_free_port(self.config.inference.host)
            self.endpoint = f"http://{self.config.inference.host}:{port}"
            self._start("inference", "inference", self._engine_config(port))
        for source in self.config.sources:
            if source.address is None:
                name = f"envs/eval/{source.name}.{node_name()}"
                self.run.address("eval", f"{source.name}.{node_name()}").unlink(missing_ok=True)
                self._start(name, "env-server", self._env_config(source))

    def _engine_config(self, port: int) -> InferenceProcessConfig:
        inference = self.config.inference
        settings = {
            "port": port,
            "replicas": 1,
            "max_model_len": inference.max_model_len or self.config.seq_len,
            "dtype": self.config.model.dtype if inference.dtype == "auto" else inference.dtype,
            "seed": self.config.seed if inference.seed is None else inference.seed,
            "routed_experts": False,
            "sampling_mask": False,
        }
        return InferenceProcessConfig(
            inference=inference.model_copy(update=settings), model=self.config.model, run_dir=str(self.run)
        )

    def _env_config(self, source: EvalSourceConfig) -> EnvServerConfig:
        data = {
            "source": source,
            "split": "eval",
            "model_path": self.config.model.path,
            "renderer": self.config.model.renderer,
            "run_dir": str(self.run),
            "run_id": self.run_id,
            "request_timeout_s": self.config.inference.request_timeout_s,
        }
        return make_config(EnvServerConfig, data)

    def _start(self, name: str, command: str, config: EnvServerConfig | InferenceProcessConfig) -> None:
        path = self.run.configs / f"{name}.json"
        write_json_atomic(path, config.model_dump(mode="json"))
        argv = (sys.executable, "-m", "moorage.cli.main", command, "@", str(path))
        self._children.append(
            children.start(ProcessRecord(name, command, argv, self.run.log(name)), self.token)
        )

    async def watch(self) -> None:
        """Raise when a child ends, with its last error. Unblocked by that, or cancelled."""
        while True:
            for child in self._children:
                code = child.poll()
                if code is not None:
                    error = EngineError if child.record.kind == "inference" else EnvServerError
                    text = f"{child.record.name} ended with {code}: {children.error_line(child.record.log)}"
                    raise error(text) if error is EngineError else EnvServerError("unreachable", text)
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        """End all children, env servers before the engine."""
        ordered = sorted(self._children, key=lambda child: child.record.kind == "inference")
        for child in ordered:
            children.stop([child], timeout_s=10.0)
