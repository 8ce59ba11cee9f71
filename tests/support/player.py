"""Play one episode of an env block in this process: real verifiers, real spool, a scripted engine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from moorage.engine.generate import GenerateClient
from moorage.engine.render import RendererPool
from moorage.env.detectors import make_detectors
from moorage.env.keep import keep_episode, read_payload
from moorage.env.model_client import ModelService, model_seam, policy_client, serving
from moorage.env.resolve import load_env, resolve_env
from moorage.env.turns import SideTable
from moorage.payload.codec import BranchArrays, decode
from moorage.payload.spool import Spool
from tests.support.chatty_model import RENDERER
from tests.support.scripted_engine import EngineSettings, Script, ScriptedEngine

ENVS = Path(__file__).parent / "envs"
if str(ENVS) not in sys.path:
    sys.path.append(str(ENVS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ENVS), os.environ.get("PYTHONPATH")]))


@dataclass
class Stage:
    """Where the episodes of a test run."""

    folder: Path
    model_path: Path
    engine: ScriptedEngine
    env: vf.Env
    service: ModelService
    spool: Spool
    sampling: dict[str, Any]

    async def play(self, number: int = 0, *, keep: bool = True, deadline_s: float = 60.0) -> vf.Episode:
        """An episode of the task at place `number`, kept and stripped unless told otherwise."""
        task = next(t for i, t in enumerate(self.env.taskset) if i == number)
        context = vf.ModelContext(
            model="policy", client=policy_client(self.engine.url), sampling=vf.SamplingConfig(**self.sampling)
        )
        with self.service.turns.begin(model="policy", deadline_s=deadline_s) as run:
            (slot,) = self.env.slots(task)
            episode = await self.env.run_slot(slot, context, on_trace=run.watch)
            if keep:
                self.keep(episode)
        return episode

    def keep(self, episode: vf.Episode, request_id: str = "r1") -> None:
        detectors = make_detectors({}, self.model_path)
        keep_episode(
            episode, self.spool, request_id, self.service.turns, "http://store", "train/x", detectors
        )

    def blobs(self, trace: vf.Trace) -> list[BranchArrays]:
        """What was kept of a trace, in branch order."""
        payload = read_payload(trace)
        assert payload is not None
        return [decode(path.read_bytes()) for b in payload.branches for path in self.folder.rglob(f"{b.id}*")]


def on_stage(
    folder: Path,
    model_path: Path,
    env: dict[str, Any],
    script: Script,
    act: Callable[[Stage], Any],
    *,
    settings: EngineSettings | None = None,
    head_k: int = 0,
    sampling: dict[str, Any] | None = None,
    local: bool = True,
) -> Any:
    """Set up everything, run `act(stage)`, take it down. Returns what `act` returned.

    `local` False keeps direct harnesses from finding their rollout in this process: they use HTTP.
    """

    async def run() -> Any:
        data, _ = resolve_env(env, "train")
        loaded = load_env(data)
        service = ModelService(
            RendererPool(model_path, RENDERER), GenerateClient(retry_s=1.0), SideTable(), head_k=head_k
        )
        spool = Spool(folder, "run.1", 1 << 30)
        sampled = {"temperature": 1.0, "max_tokens": 64, **(sampling or {})}
        stage = Stage(folder, model_path, engine, loaded, service, spool, sampled)
        try:
            async with serving(loaded, service) if local else _over_http(loaded, service):
                return await act(stage)
        finally:
            await service.engine.close()
            spool.close()
            assert len(service.turns) == 0

    with ScriptedEngine(script, model_path, settings) as engine:
        return asyncio.run(run())


@asynccontextmanager
async def _over_http(env: vf.Env, service: ModelService) -> AsyncIterator[None]:
    with model_seam(service):
        async with env.serving():
            yield


def last_user(prompt: str) -> str:
    """The text of the last user turn of a prompt."""
    return prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
