"""Plain HTTP to an engine under contract, without the client that is under test elsewhere."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from tests.contract.conftest import Engine

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(
    engine: Engine,
    method: str,
    route: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> tuple[int, Any]:
    """Status and body, parsed where it is JSON."""
    data = None if method == "GET" else json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(
        engine.url + route, data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except json.JSONDecodeError:
        return status, text
