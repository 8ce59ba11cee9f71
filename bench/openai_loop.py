"""A chat loop as in-process harnesses usually are written, with the openai client. For `direct.py`."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig

__all__ = ["OpenAILoopHarness"]


class OpenAILoopConfig(HarnessConfig):
    id: str = "openai_loop"


class OpenAILoopHarness(vf.Harness[OpenAILoopConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:  # noqa: ARG002
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[{"role": "user", "content": data.prompt}]
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
