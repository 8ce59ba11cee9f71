"""A real HTTP server on loopback whose routes a test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """The url of a server with `routes`, each as `METHOD /path`. It cancels handlers of callers that left."""
    app = web.Application()
    for route, handler in routes.items():
        method, path = route.split(" ", 1)
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def models(_: web.Request) -> web.Response:
    """`GET /v1/models` of an engine with room for 64 tokens."""
    return web.json_response({"data": [{"id": "policy", "max_model_len": 64}]})


def entry(token: int, logprob: float | None, others: list[tuple[int, float]] | None = None) -> dict[str, Any]:
    """One position of `logprobs.content`: the sampled token and what is listed beside it."""
    listed = [{"token_id": t, "logprob": lp, "rank": None} for t, lp in [(token, logprob), *(others or [])]]
    return {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": listed}


def reply(token_ids: list[int], content: list[dict[str, Any]] | None = None, **choice: Any) -> dict[str, Any]:
    """A generate reply of the agreed form."""
    content = [entry(token, -1.0) for token in token_ids] if content is None else content
    base = {
        "index": 0,
        "token_ids": token_ids,
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {"content": content},
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(token_ids)}],
    }
    return {"request_id": "generate-tokens-x", "model": "policy", "choices": [{**base, **choice}]}
