"""HTTP to an engine: the session's settings and what an error answer says.

Owns what generate calls and fleet control share. Does not know routes.
"""

from __future__ import annotations

import aiohttp
import orjson

from moorage.core.errors import EngineError

KEEPALIVE_S = 3.0
"""Below the 5 s after which a stock vLLM closes idle connections: no request meets a closed one."""

RETRYABLE_STATUS = frozenset({429, 503})
"""The engine has not begun the request: its queue is full, or it is paused in a mode that refuses."""


def open_session() -> aiohttp.ClientSession:
    """A session without a limit of connections, proxies or cookies. Call inside a running loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, use_dns_cache=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        trust_env=False,
        read_bufsize=1 << 20,
    )


def refusal(url: str, status: int, body: bytes) -> EngineError:
    """The error for an answer that is not 200."""
    return EngineError(
        f"engine {url} answered {status}: {error_message(body)}",
        status=status,
        retryable=status in RETRYABLE_STATUS,
    )


def error_message(body: bytes) -> str:
    """What an error answer says: `{"error": {"message"}}`, `{"detail"}` or the text itself, shortened."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if isinstance(data, dict):
        inner = data.get("error", data)
        found = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        if found:
            return str(found)[:500]
    return body[:500].decode(errors="replace") or "no message"
