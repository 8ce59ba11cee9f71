"""The application: token-in token-out generation, and what tells a client that the engine is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

import moorage
from moorage.engine.builtin import chat, control, gauges, wire
from moorage.engine.builtin.calls import run_all
from moorage.engine.builtin.http import SERVICE, errors, read_body, reply
from moorage.engine.builtin.request import RequestError, parse_sampling
from moorage.engine.builtin.service import Service, new_id

MAX_BODY_BYTES = 64 << 20
ID_PREFIX = "generate-tokens-"
LARGE_REPLY = 4000
"""Replies with more log-probability entries than this are built off the event loop."""


async def generate(request: web.Request) -> web.Response:
    """POST /inference/v1/generate"""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    if body.get("stream"):
        raise RequestError("stream is not supported on this route; use /v1/chat/completions", param="stream")
    if body.get("output_mode", "tokens") != "tokens":
        raise RequestError("output_mode must be tokens (others are not supported)", param="output_mode")
    params = parse_sampling(body.get("sampling_params", {}))
    call_id = ID_PREFIX + str(request.headers.get("X-Request-Id") or body.get("request_id") or new_id())
    requests = service.make_requests(call_id, body.get("token_ids"), params, body.get("cache_salt"))
    done = await run_all(service, requests)
    return_prompt = bool(body.get("return_token_ids"))

    def build() -> web.Response:
        return reply(wire.generate_reply(call_id, service.name, done, return_prompt=return_prompt))

    entries = sum(len(item.out) for item in done) * (1 + (params.logprobs or 0))
    return await asyncio.to_thread(build) if entries > LARGE_REPLY else build()


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    service = request.app[SERVICE]
    return reply(wire.model_list(service.name, service.path, service.max_model_len, service.created))


async def health(request: web.Request) -> web.Response:
    """GET /health"""
    return web.Response(status=503 if request.app[SERVICE].engine.failed.done() else 200)


async def version(_: web.Request) -> web.Response:
    """GET /version"""
    return reply({"version": moorage.__version__})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    return web.Response(text=gauges.render(request.app[SERVICE]), content_type="text/plain")


def make_app(service: Service) -> web.Application:
    """The application; the engine thread starts and stops with it."""
    app = web.Application(middlewares=[errors], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app.add_routes(
        [
            web.post("/inference/v1/generate", generate),
            web.post("/v1/chat/completions", chat.completions),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/version", version),
            web.get("/metrics", metrics),
            *control.ROUTES,
        ]
    )
    app.cleanup_ctx.append(_run_engine)
    return app


async def _run_engine(app: web.Application) -> AsyncIterator[None]:
    app[SERVICE].engine.start()
    yield
    await app[SERVICE].engine.stop()
