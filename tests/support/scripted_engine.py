"""An engine whose answers a test writes: the routes of docs/protocols.md section 3 over a script.

It runs on a thread of its own with a real socket, so clients in this process and in others reach it alike.
`POST /inference/v1/generate` decodes the prompt, asks the script for a reply, and answers in vLLM's form,
with log-probabilities, routing rows, kept sets, heads and version labels as the engine was set up to give.
`POST /v1/chat/completions` serves agents that bring their own client.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """What the script lets the engine answer. `status` other than 200 is a refusal with `text` as message."""

    text: str
    finish_reason: str = "stop"
    status: int = 200
    delay_s: float = 0.0
    void: tuple[int, ...] = ()
    """Sampled tokens that come without a usable log-probability."""
    rows: bool = True
    """Whether routing rows come back, where the engine gives any."""
    version: str | None = None
    """Label of this reply's weights; None: the engine's own."""


Script = Callable[[str], "Reply | str"]
"""Prompt text, markers included, to reply."""


@dataclass
class EngineSettings:
    """What kind of engine this is."""

    name: str = "policy"
    routing: tuple[int, int] | None = None
    """(layers, k) of routing rows; None for a dense model."""
    num_experts: int = 8
    masks: bool = False
    max_model_len: int = 100_000
    version: str = "default"


@dataclass
class Seen:
    """One request as it arrived."""

    body: dict[str, Any]
    prompt: str
    session_id: str | None
    reply: dict[str, Any] = field(default_factory=dict)


class ScriptedEngine:
    """A context manager; `url` is valid while it is entered, `seen` lists the generate requests."""

    def __init__(self, script: Script, model_path: Path, settings: EngineSettings | None = None) -> None:
        from moorage.engine.render import load_tokenizer

        self.script = script
        self.settings = settings or EngineSettings()
        self.tokenizer = load_tokenizer(model_path)
        self.seen: list[Seen] = []
        self.aborted: list[str] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-engine", daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._runner is not None
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", _empty)
        app.router.add_post("/abort_requests", self._abort)
        app.router.add_post("/pause", _empty)
        app.router.add_post("/resume", _empty)
        app.router.add_post("/update_weight_version", self._label)
        app.router.add_get("/weight_info", self._weight_info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = self.tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        seen = Seen(body, prompt, request.headers.get("X-Session-ID"))
        self.seen.append(seen)
        reply = self._ask(prompt)
        await asyncio.sleep(reply.delay_s)
        if reply.status != 200:
            return web.json_response({"error": {"message": reply.text}}, status=reply.status)
        seen.reply = self.answer(body, reply)
        return web.json_response(seen.reply)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        reply = self._ask(str(body["messages"][-1]["content"]))
        await asyncio.sleep(reply.delay_s)
        if reply.status != 200:
            return web.json_response({"error": {"message": reply.text}}, status=reply.status)
        message = {"role": "assistant", "content": reply.text}
        return web.json_response(
            {
                "id": "chat",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def _models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        card = {"id": self.settings.name, "object": "model", "max_model_len": self.settings.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.extend((await request.json()).get("request_ids", []))
        return web.json_response({"status": "aborted"})

    async def _label(self, request: web.Request) -> web.Response:
        self.settings.version = (await request.json())["new_version"]
        return web.json_response({})

    async def _weight_info(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"weight_version": self.settings.version})

    def _ask(self, prompt: str) -> Reply:
        reply = self.script(prompt)
        return Reply(reply) if isinstance(reply, str) else reply

    def answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        """The reply in vLLM's form. Its numbers are drawn from the prompt, so a repeat gives the same."""
        params = body["sampling_params"]
        prompt_len = len(body["token_ids"])
        ids = self.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        rng = np.random.default_rng([prompt_len, len(ids), sum(body["token_ids"])])
        logprobs = [float(np.float32(-rng.random())) for _ in ids]
        head_k = int(params.get("logprobs") or 1)
        content = [
            self._entry(rng, t, lp, head_k, i in reply.void)
            for i, (t, lp) in enumerate(zip(ids, logprobs, strict=True))
        ]
        start = int(params.get("routed_experts_prompt_start") or 0)
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": reply.finish_reason,
            "stop_reason": None,
            "logprobs": {"content": content},
            "routed_experts": self._rows(rng, prompt_len - start + len(ids) - 1) if reply.rows else None,
            "sampling_mask": [sorted({t, *rng.integers(0, 90, 3).tolist()}) for t in ids]
            if self.settings.masks
            else None,
            "weight_versions": [
                {"version": reply.version or self.settings.version, "start": 0, "end": len(ids)}
            ],
        }
        usage = {
            "prompt_tokens": prompt_len,
            "completion_tokens": len(ids),
            "total_tokens": prompt_len + len(ids),
        }
        return {
            "request_id": "generate-tokens-x",
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }

    def _entry(self, rng: Any, token: int, logprob: float, head_k: int, void: bool) -> dict[str, Any]:
        value = -9999.0 if void else logprob
        others = [t for t in rng.permutation(90).tolist() if t != token][: max(0, head_k - 1)]
        top = [{"token_id": token, "logprob": value, "rank": 1}]
        top += [
            {"token_id": t, "logprob": float(np.float32(-2.0 - i)), "rank": i + 2}
            for i, t in enumerate(others)
        ]
        return {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": top}

    def _rows(self, rng: Any, num_rows: int) -> str | None:
        if self.settings.routing is None:
            return None
        shape = (num_rows, *self.settings.routing)
        dtype = np.uint8 if self.settings.num_experts <= 256 else np.uint16
        buffer = io.BytesIO()
        np.save(buffer, rng.integers(0, self.settings.num_experts, shape).astype(dtype))
        return base64.b64encode(buffer.getvalue()).decode()


async def _empty(request: web.Request) -> web.Response:  # noqa: ARG001
    return web.json_response({})
