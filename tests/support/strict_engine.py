"""Engines that fail on any order of a weight update but the right one (docs/protocols.md section 3).

A `Yard` is a set of replicas that know of each other: nothing is loaded before all are paused, nothing is
labelled before all are loaded, nothing resumes before all are labelled, and nobody pauses while work that was
declared stale is running. A request out of order is answered 409 and noted in `faults`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.Response]]
STAGES = ("serving", "paused", "loaded", "labelled")


@dataclass
class Yard:
    """What all replicas share. `fail`: (replica, action) that answers 500; `hang`: that never answers."""

    num_replicas: int = 2
    clear_cache: str = "true"
    fail: tuple[int, str] | None = None
    hang: tuple[int, str] | None = None
    stale: int = 0
    stage: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    events: list[tuple[float, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stage = ["serving"] * self.num_replicas
        self.label = ["default"] * self.num_replicas

    def actions(self, replica: int) -> list[str]:
        """What `replica` was told, in order."""
        return [action for _, index, action in self.events if index == replica]

    def complain(self, action: str, replica: int, query: dict[str, str]) -> str | None:
        """What is wrong with doing `action` on `replica` now."""
        own = self.stage[replica]
        if action == "pause":
            if self.stale:
                return f"{self.stale} stale requests still run"
            if query != {"mode": "keep", "clear_cache": self.clear_cache}:
                return f"paused with {query}"
            return None if own == "serving" else f"paused while {own}"
        if action == "load":
            return None if own == "paused" and self._all_at_least("paused") else f"loaded at {self.stage}"
        if action == "label":
            if own == "serving" and self._all_at_least("serving") and set(self.stage) == {"serving"}:
                return None  # the start version
            return None if own == "loaded" and self._all_at_least("loaded") else f"labelled at {self.stage}"
        if self.fail or self.hang:
            return None  # resuming after a failure is right at every stage
        return None if own == "labelled" and self._resumable() else f"resumed at {self.stage}"

    def _all_at_least(self, stage: str) -> bool:
        return all(STAGES.index(now) >= STAGES.index(stage) for now in self.stage)

    def _resumable(self) -> bool:
        return all(now in ("labelled", "serving") for now in self.stage)

    def carry_out(self, action: str, replica: int, body: dict[str, Any]) -> None:
        after = {"pause": "paused", "load": "loaded", "resume": "serving"}
        if action == "label":
            self.label[replica] = body["new_version"]
            if self.stage[replica] == "loaded":
                self.stage[replica] = "labelled"
        else:
            self.stage[replica] = after[action]


def _handler(yard: Yard, replica: int, action: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        yard.events.append((time.monotonic(), replica, action))
        if yard.hang == (replica, action):
            await asyncio.sleep(60)
        if yard.fail == (replica, action):
            return web.json_response({"error": {"message": f"cannot {action}"}}, status=500)
        complaint = yard.complain(action, replica, dict(request.query))
        if complaint:
            yard.faults.append(f"replica {replica}: {complaint}")
            return web.json_response({"error": {"message": complaint}}, status=409)
        await asyncio.sleep(0.02 * (replica + 1))  # replicas are never in step
        yard.carry_out(action, replica, body)
        return web.json_response({})

    return handle


@asynccontextmanager
async def serve_yard(yard: Yard) -> AsyncIterator[list[str]]:
    """The urls of the yard's replicas."""
    runners: list[web.AppRunner] = []
    urls = []
    for replica in range(yard.num_replicas):
        app = web.Application()
        app.router.add_get("/health", _ok)
        app.router.add_get("/v1/models", _models)
        app.router.add_get("/metrics", _metrics)
        app.router.add_post("/pause", _handler(yard, replica, "pause"))
        app.router.add_post("/collective_rpc", _handler(yard, replica, "load"))
        app.router.add_post("/update_weight_version", _handler(yard, replica, "label"))
        app.router.add_post("/resume", _handler(yard, replica, "resume"))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


async def _ok(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "policy", "max_model_len": 64}]})


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(text='vllm:num_requests_running{engine="0"} 2.0\n')
