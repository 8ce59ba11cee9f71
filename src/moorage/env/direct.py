"""The direct harness: a chat loop in this process, for agents that only talk (and call tools).

It is a verifiers in-process harness (`harness = { id = "moorage.env.direct" }`): no program, no container, no
HTTP client library; what it costs is in docs/performance.md. Multi-turn by user simulator comes from
verifiers' interactions (`SUPPORTS_RESUME`), tools from the task's MCP servers.

Promises: every model call goes through the rollout's interception, so limits, stops, hooks and the trace
are verifiers' own. Does not know: engines, payloads, tokens.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import aiohttp
import orjson
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["DirectHarness"]


class DirectHarnessConfig(HarnessConfig):
    id: str = "moorage.env.direct"


class DirectHarness(Harness[DirectHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0913 - verifiers' contract
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,  # noqa: ARG002 - nothing runs in it
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Talk until the model stops calling tools, a limit or a stop ends the rollout, or a call fails."""
        messages = self._opening(data)
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            while True:
                body = {"model": ctx.model, "messages": messages}
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    answer = orjson.loads(await response.read())
                if response.status != 200:
                    return ProgramResult(exit_code=1, stdout="", stderr=str(answer))
                return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages.extend(message_to_wire(message) for message in prompt)
        return messages
