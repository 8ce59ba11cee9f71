"""Control routes: pausing, aborting, weights and their version label (docs/protocols.md section 3).

Unprotected, as vLLM's are.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from moorage.engine.builtin.http import SERVICE, read_body, reply
from moorage.engine.builtin.request import RequestError
from moorage.engine.builtin.worker import PAUSE_MODES


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


ROUTES = (
    web.post("/pause", pause),
    web.post("/resume", resume),
    web.get("/is_paused", is_paused),
    web.post("/abort_requests", abort_requests),
    web.post("/inference/v1/abort_requests", abort_requests),
    web.post("/collective_rpc", collective_rpc),
    web.post("/update_weight_version", update_weight_version),
    web.get("/weight_info", weight_info),
    web.post("/reset_prefix_cache", reset_prefix_cache),
)
