"""Running the choices of one call to their ends: fan-out over `n`, stop strings, text for streaming.

When the caller goes away (cancellation) or one choice fails, all choices of the call are aborted in the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from moorage.core.errors import EngineError
from moorage.engine.builtin.request import Request, RequestError
from moorage.engine.builtin.service import Service


async def run_all(service: Service, requests: list[Request]) -> list[Request]:
    """The finished requests, in order."""
    if len(requests) == 1:
        done = [await run(service, requests[0])]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(service, request)) for request in requests]
            done = [task.result() for task in tasks]
        except* (RequestError, EngineError) as failed:
            raise failed.exceptions[0] from None
    return done


async def run(service: Service, request: Request) -> Request:
    """One finished request."""
    if request.params.stop_strings:
        async for update in stream(service, request):
            if update.request.finish_reason is not None:
                return update.request
        raise AssertionError("a stream ends with a finish reason")
    done = await service.engine.generate(request)
    service.counts[done.finish_reason or "abort"] += 1
    return done


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added: output tokens start..end, and the text that became certain with them."""

    request: Request
    start: int
    end: int
    text: str


async def stream(service: Service, request: Request) -> AsyncGenerator[Update]:
    """Updates of `request`; the last one's request has a finish reason. `request.streams` must be set."""
    assert request.streams
    assert service.tokenizer is not None
    decoder = TextDecoder(service.tokenizer, request.params.stop_strings)
    start = 0
    queue = service.engine.submit(request)
    try:
        while True:
            got, count = await queue.get()
            if isinstance(got, BaseException):
                raise got
            ended = got.finish_reason is not None and count == len(got.out)
            text, matched = decoder.push(got.out[start:count], last=ended)
            if matched is not None:
                got = cut(got, count, matched)
            elif not ended and not text:
                continue
            yield Update(got, start, count, text)
            start = count
            if matched is not None or ended:
                service.counts[got.finish_reason or "abort"] += 1
                return
    finally:
        service.engine.drop(request)


def cut(request: Request, count: int, stop: str) -> Request:
    """`request` as it was after `count` tokens, ended by the stop string `stop`."""
    rows = request.routed_experts
    if rows is not None:
        rows = rows[: len(request.prompt) - request.params.routed_experts_prompt_start + count - 1]
    return replace(
        request,
        out=request.out[:count],
        logprobs=request.logprobs[:count],
        ranks=request.ranks[:count],
        head_ids=request.head_ids[:count],
        head_logprobs=request.head_logprobs[:count],
        masks=request.masks[:count],
        versions=[item for item in request.versions if item[1] < count],
        routed_experts=rows,
        finish_reason="stop",
        stop_reason=stop,
    )


class TextDecoder:
    """Turns tokens into text piece by piece, looking for stop strings.

    Text is held back while it could still change: an unfinished character, or the beginning of a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._anchor = 0
        self._read = 0
        self._held = ""

    def push(self, ids: list[int], *, last: bool) -> tuple[str, str | None]:
        """(new text, stop string that ended it). The text of a stop string, and what follows, is left out."""
        self._ids += ids
        before = self._decode(self._anchor, self._read)
        now = self._decode(self._anchor, len(self._ids))
        if now.endswith("\ufffd") and not last:
            return "", None
        self._held += now[len(before) :]
        self._anchor, self._read = self._read, len(self._ids)
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            return self._held[:at], stop
        keep = 0 if last else self._may_begin_stop()
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready, None

    def _may_begin_stop(self) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))
