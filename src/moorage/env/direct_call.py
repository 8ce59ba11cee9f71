"""Model calls of a rollout from inside its own process: verifiers' interception without HTTP.

verifiers serves every rollout's model calls over a loopback HTTP server, since harnesses are programs. A chat
loop in the same process can take the same steps on the same session by function call. Owns that sequence
(`take_turn`), finding a rollout's session by its secret, and the HTTP fallback when there is none here.

Promises: limits, stops, hooks, rewrites, the graph commit and the per-call record happen in verifiers' order
and by verifiers' own methods, so a trace made here equals one made over HTTP (a test compares them).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import orjson
from verifiers.v1 import graph
from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError, RolloutError, TaskError
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.types import Request, Response

DIALECT = ChatDialect()
RETRIES = 2
"""Further tries of a call that failed for the moment, as the HTTP clients of this API do."""


class Refusal(Exception):
    """A call that gave no message: the rollout was stopped, or the model call failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def context_overflow(self) -> bool:
        """Whether the conversation has outgrown the model's window: a budget used up, not a fault."""
        return self.status in (400, 413) and any(
            m in self.message.casefold() for m in CONTEXT_OVERFLOW_MARKERS
        )

    @property
    def retryable(self) -> bool:
        return self.status == 429 or self.status >= 500


class Caller(Protocol):
    """One rollout's way to the model and to its tool gate."""

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant message (chat-completions form) that answers `messages`. Raises Refusal."""
        ...

    @property
    def retries(self) -> int:
        """Further tries that a call which failed for the moment deserves."""
        ...

    async def gate(self, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        """verifiers' verdict on a tool call that is about to run."""
        ...


_servers: list[Any] = []
"""Interceptions of the environments that are served in this process now."""


@contextmanager
def local_interception(interception: Any) -> Iterator[None]:
    """While entered, rollouts registered with `interception` (a server or a pool) are called in process."""
    _servers.append(interception)
    try:
        yield
    finally:
        _servers.remove(interception)


def find_caller(secret: str, model: str) -> LocalCaller | None:
    """The caller of the rollout that `secret` names, when it is registered in this process."""
    for interception in _servers:
        members = [interception] if isinstance(interception, InterceptionServer) else interception.servers
        for server in members:
            session = server.sessions.get(secret)
            if session is not None:
                return LocalCaller(server, session, model)
    return None


@dataclass(frozen=True)
class LocalCaller:
    """Calls by function, on the session itself."""

    server: InterceptionServer
    session: RolloutSession
    model: str

    @property
    def retries(self) -> int:
        """None for the policy: its client has tried again until the deadline already."""
        return 0 if isinstance(self.session.ctx.client, TrainClientConfig) else RETRIES

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if tools:
            body["tools"] = tools
        response = await take_turn(self.server, self.session, body)
        return message_to_wire(response.message)

    async def gate(self, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return await self.session.decide_tool(call_id, name, arguments)


@dataclass(frozen=True)
class HttpCaller:
    """Calls over the interception server, for rollouts that are registered elsewhere."""

    http: aiohttp.ClientSession
    endpoint: str
    secret: str
    model: str
    gate_url: str | None
    retries: int = RETRIES

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if tools:
            body["tools"] = tools
        status, answer = await self._post(f"{self.endpoint}/chat/completions", body)
        if status != 200:
            raise Refusal(status, str(answer.get("error", answer)))
        return answer["choices"][0]["message"]

    async def gate(self, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        if self.gate_url is None:
            return {"action": "allow"}
        status, answer = await self._post(
            self.gate_url, {"tool_call_id": call_id, "name": name, "arguments": arguments}
        )
        if status != 200:
            raise Refusal(status, str(answer.get("error", answer)))
        return answer

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.secret}", "Content-Type": "application/json"}
        async with self.http.post(url, data=orjson.dumps(body), headers=headers) as response:
            return response.status, orjson.loads(await response.read())


async def take_turn(server: InterceptionServer, session: RolloutSession, body: dict[str, Any]) -> Response:
    """One model call of `session`, committed to its trace. Raises Refusal."""
    body = DIALECT.apply_overrides(body, session.ctx.model, session.ctx.sampling)
    request = await _admit(session, body)
    try:
        body, paths = server.mediate_capabilities(session, DIALECT, body)
        if session.network_policy.network_restricted:
            request = DIALECT.parse_request(body)
        turn = graph.prepare_turn(session.trace, request.messages, request.tools)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    session.trace.preview(turn, turn.tail)
    if session.on_turn_input is not None:
        on_input, session.on_turn_input = session.on_turn_input, None
        on_input()
    return await _sample(server, session, body, turn, paths)


async def _admit(session: RolloutSession, body: dict[str, Any]) -> Request:
    """The request as limits, stops and hooks let it pass."""
    if session.released:
        raise Refusal(409, "rollout concluded")
    if session.stopped:
        raise Refusal(400, f"rollout stopped: {session.trace.stop_condition}")
    try:
        original = DIALECT.parse_request(body)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    try:
        refused = await session.refused()
        if refused is not None:
            raise Refusal(400, f"rollout stopped: {refused}")
        request, rewrites, stopped = await session.rewrite_request(original)
    except (Refusal, RolloutError) as error:
        raise _failed(session, error) from error
    except Exception as error:
        hook = TaskError(f"model boundary hook failed: {type(error).__name__}: {error}")
        raise _failed(session, hook) from error
    session.trace.request_rewrites.extend(rewrites)
    if stopped is not None:
        graph.prepare_turn(session.trace, request.messages, request.tools).commit_prompt()
        session.trace.stop(stopped)
        raise Refusal(400, f"rollout stopped: {stopped}")
    if request != original:
        DIALECT.rewrite_request(body, original, request)
    return request


async def _sample(
    server: InterceptionServer,
    session: RolloutSession,
    body: dict[str, Any],
    turn: graph.PendingTurn,
    paths: list[str],
) -> Response:
    assert session.client is not None
    session.error = None
    response: Response | None = None
    node: int | None = None
    failure: BaseException | None = None
    started = time.time()
    try:
        response = await session.client.get_response(
            DIALECT, body, session.ctx.sampling, headers={}, session_id=session.trace.id, turn=turn
        )
        if session.released:
            raise Refusal(409, "rollout concluded")
        response, stopped = await _rewrite(session, response)
        if session.stopped:
            raise Refusal(400, f"rollout stopped: {session.trace.stop_condition}")
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            session.trace.stop(stopped)
            raise Refusal(400, f"rollout stopped: {stopped}")
        return response
    except Refusal:
        raise
    except RolloutError as error:
        failure = error
        raise _failed(session, error) from error
    except Exception as error:
        failure = error
        raise _failed(session, ProviderError(f"{type(error).__name__}: {error}")) from error
    except BaseException as error:
        failure = error
        raise
    finally:
        if node is None:
            turn.abandon()
        server.record_call(
            session,
            DIALECT,
            body,
            started,
            node=node,
            finish_reason=response.finish_reason if response else None,
            usage=response.usage if response else None,
            error=failure,
            policy_paths=paths,
        )


async def _rewrite(session: RolloutSession, response: Response) -> tuple[Response, str | None]:
    if not session.response_interceptors and not session.response_stops:
        return response, None
    response, rewrites, stopped = await session.rewrite_response(response)
    if rewrites:
        raw = response.raw or {}
        DIALECT.rewrite_response(raw, response.message.content or "")
        response = DIALECT.parse_response(DIALECT.validate_response(raw))
        response.raw = raw
        session.trace.response_rewrites.extend(rewrites)
    return response, stopped


def _failed(session: RolloutSession, error: Exception) -> Refusal:
    """Leave the real cause where the rollout looks for it."""
    if isinstance(error, Refusal):
        return error
    assert isinstance(error, RolloutError)
    session.error = error
    return Refusal(getattr(error, "status_code", 502), str(error))
