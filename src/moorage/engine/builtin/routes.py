"""The HTTP routes of docs/protocols.md section 3, but for chat (`chat.py`) and metrics (`gauges.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

import moorage
from moorage.core.errors import EngineError
from moorage.engine.builtin import wire
from moorage.engine.builtin.request import Request, RequestError, parse_sampling
from moorage.engine.builtin.service import Service, new_id
from moorage.engine.builtin.worker import PAUSE_MODES

SERVICE = web.AppKey("service", Service)
MAX_BODY_BYTES = 64 << 20
ID_PREFIX = "generate-tokens-"


def reply(data: Any, status: int = 200) -> web.Response:
    """JSON, compact."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as vLLM's error object."""
    try:
        return await handler(request)
    except RequestError as error:
        return reply(wire.error_body(str(error), error.status, error.param), error.status)
    except EngineError as error:
        status = error.status or 500
        return reply(wire.error_body(str(error), status), status)
    except web.HTTPException as error:
        return reply(wire.error_body(error.reason, error.status), error.status)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; an absent body is empty. Raises RequestError."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON ({error})", param="body") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", param="body")
    return data


async def run_all(service: Service, requests: list[Request]) -> list[Request]:
    """All choices of a call; when one fails or the caller goes away, all are aborted."""
    try:
        if len(requests) == 1:
            done = [await service.engine.generate(requests[0])]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.engine.generate(request)) for request in requests]
            done = [task.result() for task in tasks]
    except* (RequestError, EngineError) as errors:
        raise errors.exceptions[0] from None
    for request in done:
        service.counts[request.finish_reason or "abort"] += 1
    return done


async def generate(request: web.Request) -> web.Response:
    """POST /inference/v1/generate"""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    if body.get("stream"):
        raise RequestError("stream is not supported on this route; use /v1/chat/completions", param="stream")
    params = parse_sampling(body.get("sampling_params", {}))
    call_id = ID_PREFIX + str(request.headers.get("X-Request-Id") or body.get("request_id") or new_id())
    requests = service.make_requests(call_id, body.get("token_ids"), params, body.get("cache_salt"))
    done = await run_all(service, requests)
    return reply(
        wire.generate_reply(call_id, service.name, done, return_prompt=bool(body.get("return_token_ids")))
    )


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


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=abort|wait|keep&clear_cache=true|false"""
    mode = request.query.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)} (given: {mode!r})", param="mode")
    await request.app[SERVICE].engine.pause(mode, clear_cache=_flag(request, "clear_cache", True))
    return reply({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """POST /resume"""
    await request.app[SERVICE].engine.resume()
    return reply({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused"""
    return reply({"is_paused": request.app[SERVICE].engine.paused is not None})


async def abort_requests(request: web.Request) -> web.Response:
    """POST /abort_requests, /inference/v1/abort_requests; no ids: all"""
    ids = (await read_body(request)).get("request_ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(item, str) for item in ids)):
        raise RequestError(
            f"request_ids must be a list of strings (given: {ids!r})", param="body.request_ids"
        )
    count = await request.app[SERVICE].engine.abort(ids)
    return reply({"status": "aborted", "aborted": count})


async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc {"method": "reload_weights", "kwargs": {"weights_path": folder}}"""
    service = request.app[SERVICE]
    body = await read_body(request)
    method = body.get("method")
    if method != "reload_weights":
        raise RequestError(f"method must be reload_weights (given: {method!r})", param="body.method")
    folder = (body.get("kwargs") or {}).get("weights_path")
    if not isinstance(folder, str) or not folder:
        raise RequestError(f"kwargs.weights_path must name a folder (given: {folder!r})", param="body.kwargs")
    await service.engine.call(lambda: service.scheduler.reload(Path(folder)))
    return reply({"results": [None]})


async def update_weight_version(request: web.Request) -> web.Response:
    """POST /update_weight_version {"new_version": "7"}"""
    service = request.app[SERVICE]
    label = (await read_body(request)).get("new_version")
    if not isinstance(label, str):
        raise RequestError(f"new_version must be a string (given: {label!r})", param="body.new_version")
    await service.engine.call(lambda: setattr(service.scheduler, "label", label))
    return reply({"success": True, "new_version": label})


async def weight_info(request: web.Request) -> web.Response:
    """GET /weight_info"""
    return reply({"weight_version": request.app[SERVICE].scheduler.label})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache?reset_running_requests=true|false"""
    service = request.app[SERVICE]
    running = _flag(request, "reset_running_requests", False)
    await service.engine.call(service.scheduler.preempt if running else service.scheduler.prefixes.clear)
    return reply({"success": True})


def _flag(request: web.Request, name: str, default: bool) -> bool:
    given = request.query.get(name)
    if given is None:
        return default
    if given.lower() in ("true", "1"):
        return True
    if given.lower() in ("false", "0"):
        return False
    raise RequestError(f"{name} must be true or false (given: {given!r})", param=name)


def make_app(service: Service) -> web.Application:
    """The application; the engine thread starts and stops with it."""
    app = web.Application(middlewares=[errors], client_max_size=MAX_BODY_BYTES)
    app[SERVICE] = service
    app.add_routes(
        [
            web.post("/inference/v1/generate", generate),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/version", version),
            web.post("/pause", pause),
            web.post("/resume", resume),
            web.get("/is_paused", is_paused),
            web.post("/abort_requests", abort_requests),
            web.post("/inference/v1/abort_requests", abort_requests),
            web.post("/collective_rpc", collective_rpc),
            web.post("/update_weight_version", update_weight_version),
            web.get("/weight_info", weight_info),
            web.post("/reset_prefix_cache", reset_prefix_cache),
        ]
    )

    async def run_engine(app: web.Application):  # noqa: ANN202
        app[SERVICE].engine.start()
        yield
        await app[SERVICE].engine.stop()

    app.cleanup_ctx.append(run_engine)
    return app
