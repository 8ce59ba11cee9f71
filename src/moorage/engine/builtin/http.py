"""What every route needs: the application's service, JSON in and out, errors in vLLM's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from moorage.core.errors import EngineError
from moorage.engine.builtin import wire
from moorage.engine.builtin.request import RequestError
from moorage.engine.builtin.service import Service

SERVICE = web.AppKey("service", Service)


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
