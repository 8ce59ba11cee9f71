"""POST /v1/chat/completions, for people and for evaluation: whole replies and server-sent events.

The folder's own chat template makes the prompt. Tool calls are not parsed: what the model wrote is the
content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import orjson
from aiohttp import web
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from moorage.core.errors import EngineError
from moorage.engine.builtin import wire
from moorage.engine.builtin.calls import Update, run_all, stream
from moorage.engine.builtin.http import SERVICE, read_body, reply
from moorage.engine.builtin.request import Request, RequestError, SamplingParams, parse_sampling
from moorage.engine.builtin.service import Service, new_id

MAX_TOP_LOGPROBS = 1024
PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)


async def completions(request: web.Request) -> web.StreamResponse:
    """One chat completion."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise RequestError(f"{service.path} has no tokenizer; chat completions need one", status=404)
    params = chat_params(body)
    tokens = await asyncio.to_thread(render, tokenizer, body)
    call_id = "chatcmpl-" + (request.headers.get("X-Request-Id") or new_id())
    streams = bool(body.get("stream"))
    requests = service.make_requests(
        call_id, tokens, params, body.get("cache_salt"), streams=streams, least_head=1
    )
    if streams:
        return await _send_events(request, service, call_id, requests, body)
    done = await run_all(service, requests)
    return reply(chat_reply(call_id, service.name, tokenizer, done, body))


def chat_params(body: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of a chat body. Raises RequestError."""
    kind = (body.get("response_format") or {}).get("type", "text")
    if kind != "text":
        raise RequestError(f"response_format {kind!r} is not supported", param="response_format")
    given = {key: body[key] for key in PASSED if body.get(key) is not None}
    longest = body.get("max_completion_tokens") or body.get("max_tokens")
    if longest is not None:
        given["max_tokens"] = longest
    if body.get("logprobs"):
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be 0 to {MAX_TOP_LOGPROBS} (given: {top!r})", param="top_logprobs"
            )
        given["logprobs"] = top
    elif body.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return parse_sampling(given)


def render(tokenizer: PreTrainedTokenizerFast, body: dict[str, Any]) -> list[int]:
    """The prompt's token ids. Raises RequestError when the messages are malformed or the template refuses
    them."""
    try:
        messages = msgspec.convert(body.get("messages"), list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise RequestError(f"messages: {error}", param="messages") from None
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise RequestError("messages must be a non-empty list of objects with a role", param="messages")
    messages = [{**message, "content": flatten(message.get("content"))} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            tokenize=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from None
    return list(ids)  # type: ignore[arg-type]


def flatten(content: Any) -> str:
    """A message's content as text. Raises RequestError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestError("message content must be text or a list of text parts", param="messages")


def chat_reply(
    call_id: str, model: str, tokenizer: PreTrainedTokenizerFast, done: list[Request], body: dict[str, Any]
) -> dict[str, Any]:
    """The whole reply, in the form of OpenAI with vLLM's additions."""
    with_ids = bool(body.get("return_token_ids"))
    choices = []
    for index, request in enumerate(done):
        message = {"role": "assistant", "content": text_of(tokenizer, request), "tool_calls": []}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(tokenizer, request, 0, len(request.out)),
                "finish_reason": request.finish_reason,
                "stop_reason": request.stop_reason,
                "token_ids": request.out if with_ids else None,
            }
        )
    return {
        "id": call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": wire.usage(done),
        "prompt_token_ids": done[0].prompt.tolist() if with_ids else None,
    }


def text_of(tokenizer: PreTrainedTokenizerFast, request: Request) -> str:
    """The completion's text, without special tokens and without the stop string that ended it."""
    text = str(tokenizer.decode(request.out, skip_special_tokens=True))
    if isinstance(request.stop_reason, str):
        return text[: text.find(request.stop_reason)]
    return text


def chat_logprobs(
    tokenizer: PreTrainedTokenizerFast, request: Request, start: int, end: int
) -> dict[str, Any] | None:
    """Log-probabilities of output tokens start..end."""
    if request.params.logprobs is None:
        return None

    def entry(item: dict[str, Any]) -> dict[str, Any]:
        token = str(tokenizer.convert_ids_to_tokens(item["token_id"]))
        return {"token": token, "logprob": item["logprob"], "bytes": list(token.encode())}

    content = []
    for at in range(start, end):
        head = [entry(item) for item in wire.head_entries(request, at)]
        content.append({**entry(wire.drawn_entry(request, at)), "top_logprobs": head})
    return {"content": content}


async def _send_events(
    request: web.Request, service: Service, call_id: str, requests: list[Request], body: dict[str, Any]
) -> web.StreamResponse:
    if len(requests) > 1:
        raise RequestError("stream with n > 1 is not supported", param="n")
    head = {
        "id": call_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": service.name,
    }
    async with aclosing(stream(service, requests[0])) as updates:
        first = await anext(updates)  # what fails before the first token still gets its status code
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        async for event in _events(service, head, first, updates, body):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _events(
    service: Service,
    head: dict[str, Any],
    update: Update | None,
    updates: AsyncGenerator[Update],
    body: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one streamed completion; an engine that dies on the way ends it with an error object."""
    assert service.tokenizer is not None

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    try:
        while update is not None:
            request = update.request
            yield chunk(
                {"content": update.text},
                logprobs=chat_logprobs(service.tokenizer, request, update.start, update.end),
                finish_reason=request.finish_reason if update.end == len(request.out) else None,
                stop_reason=request.stop_reason,
            )
            last, update = update, await anext(updates, None)
            if update is None and (body.get("stream_options") or {}).get("include_usage"):
                yield {**head, "choices": [], "usage": wire.usage([last.request])}
    except EngineError as error:
        yield wire.error_body(str(error), error.status or 500)
