"""A harness that is a program of its own: it asks twice, over HTTP, with nothing but the standard library."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig

__all__ = ["ProgramHarness", "ProgramsTaskset"]

PROGRAM = """
import json, sys, urllib.request
url, secret, model, prompt = sys.argv[1:5]
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    request = urllib.request.Request(
        url + "/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": "Bearer " + secret, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "again"}]
"""


class ProgramTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ProgramsTaskset(vf.Taskset[ProgramTask]):
    def load(self) -> Iterable[ProgramTask]:
        for number in range(3):
            yield ProgramTask(vf.TaskData(prompt=f"count {number}"), self.config.task)


class ProgramHarnessConfig(HarnessConfig):
    id: str = "programs"


class ProgramHarness(vf.Harness[ProgramHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:  # noqa: ARG002
        return await runtime.run_program(
            [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt], {}
        )
