"""The direct harness: a chat loop in this process, for agents that only talk and call tools.

It is a verifiers in-process harness (`harness = { id = "moorage.env.direct" }`): no program, no container, no
HTTP client library; what it costs is in docs/performance.md. Dialogue comes from verifiers' interactions
(`SUPPORTS_RESUME`), tools from the task's MCP servers.

Promises: every model call goes through the rollout's interception (in process where it is served here, else
over HTTP), so limits, stops, hooks and the trace are verifiers' own; a conversation that outgrows the model's
window ends the run with what there is. Does not know: engines, payloads, tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from moorage.env.direct_call import Caller, HttpCaller, Refusal, find_caller

__all__ = ["DirectHarness"]

CONNECT_TOOLS_S = 60.0
"""How long a task's tool servers may take to list their tools."""


class DirectHarnessConfig(HarnessConfig):
    id: str = "moorage.env.direct"


class DirectHarness(Harness[DirectHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,  # noqa: ARG002 - nothing runs in it
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Talk until an answer without tool calls, a limit, a stop, a full window, or a failure."""
        messages = self._opening(data)
        async with contextlib.AsyncExitStack() as stack:
            caller: Caller | None = find_caller(secret, ctx.model)
            if caller is None:
                http = await stack.enter_async_context(
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
                )
                caller = HttpCaller(http, endpoint, secret, ctx.model, tool_interception_url)
            try:
                tools = await self._connect(mcp_urls, stack)
                await _converse(caller, messages, tools, gated=tool_interception_url is not None)
            except Refusal as refusal:
                if not (refusal.context_overflow and trace.num_turns):
                    return ProgramResult(exit_code=1, stdout="", stderr=refusal.message)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages.extend(message_to_wire(message) for message in prompt)
        return messages

    async def _connect(self, mcp_urls: dict[str, str], stack: contextlib.AsyncExitStack) -> Tools:
        if not mcp_urls:
            return Tools([], {}, {})
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with asyncio.timeout(CONNECT_TOOLS_S):
            return Tools(*await connect_mcp({"mcpServers": servers}, stack))


class Tools:
    """The tools of a conversation."""

    def __init__(
        self, schemas: list[dict[str, Any]], dispatch: dict[str, Any], servers: dict[str, Any]
    ) -> None:
        self.schemas = schemas
        self._dispatch = dispatch
        self._servers = servers

    async def run(self, name: str, arguments: str) -> Any:
        """The content of a call's result; what the model got wrong is told to the model."""
        try:
            parsed = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not valid JSON ({error})"
        if not isinstance(parsed, dict):
            return f"error: the arguments must be a JSON object, not {type(parsed).__name__}"
        if name not in self._dispatch:
            return f"error: there is no tool {name!r}"
        return await call_mcp(self._servers, self._dispatch, name, parsed)


async def _converse(caller: Caller, messages: list[dict[str, Any]], tools: Tools, *, gated: bool) -> None:
    while True:
        answer = await _complete(caller, messages, tools.schemas)
        messages.append(answer)
        calls = answer.get("tool_calls") or []
        if not calls:
            return
        for call in calls:
            messages.append(await _run_tool(caller, call, tools, gated))


async def _complete(
    caller: Caller, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]
) -> dict[str, Any]:
    for attempt in range(caller.retries):
        try:
            return await caller.complete(messages, schemas)
        except Refusal as refusal:
            if not refusal.retryable:
                raise
            await asyncio.sleep(0.5 * 2**attempt)
    return await caller.complete(messages, schemas)


async def _run_tool(caller: Caller, call: dict[str, Any], tools: Tools, gated: bool) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if gated:
        verdict = await caller.gate(call["id"], name, _loaded(arguments))
        if verdict["action"] == "stop":
            raise Refusal(400, str(verdict["reason"]))
        if verdict["action"] == "deny":
            return bound_tool_message(verdict["message"])
    content = await tools.run(name, arguments)
    return bound_tool_message({"role": "tool", "tool_call_id": call["id"], "content": content, "name": name})


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return arguments
