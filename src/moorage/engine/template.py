"""A renderer for models that only have their tokenizer's chat template.

Owns the same contract as the renderers of the `renderers` package (its `DefaultRenderer` is the fallback for
what is rare), for two reasons: that one renders and tokenizes the conversation once more per message, and it
never continues a turn. Promises:

- ids equal `tokenizer.apply_chat_template(..., tokenize=True)`;
- a bridge keeps previous ids verbatim and equals a fresh render whenever the previous completion is the
  tokenizer's own spelling of its text; it answers None for templates that treat reasoning, which may rewrite
  earlier turns, and for any template that rewrites what it gave before.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from renderers.base import ParsedResponse, RenderedTokens, extract_message_tool_names
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

UNKNOWN_TOOL = "moorage_unknown_tool"


class TemplateRenderer:
    """Renders with a tokenizer's chat template. Not thread-safe: the pool holds a lock."""

    is_prefix_stable = False

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig | None = None) -> None:
        self.config = config or DefaultRendererConfig()
        self._fallback = DefaultRenderer(tokenizer, self.config)
        self._plain = self.config.tool_parser is None and self.config.reasoning_parser is None
        self._tokenizer = tokenizer
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._stop_ids = set(self._fallback.get_stop_token_ids())
        self._special = [t for t in tokenizer.all_special_tokens if t]
        template = str(tokenizer.chat_template).lower()
        self._treats_reasoning = "think" in template or "reason" in template

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end an answer."""
        return sorted(self._stop_ids)

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Ids of the conversation, each attributed to its message (-1: the generation prompt)."""
        texts = self._texts(messages, 0, tools, add_generation_prompt)
        if texts is None:  # the template rewrote an earlier message: attribute as `renderers` does
            return self._fallback.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        ids, indices = self._attribute(texts, len(messages), 0)
        return _rendered(ids, indices, messages)

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Ids of the conversation alone."""
        return self._encoder.encode(
            self._apply(messages, tools, add_generation_prompt), add_special_tokens=False
        ).ids

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The assistant message that `token_ids` spell."""
        end = next((i for i, t in enumerate(token_ids) if t in self._stop_ids), len(token_ids))
        text = self._decode(token_ids[:end])
        if not self._plain or "<think>" in text or self._prompt_opens_reasoning(prompt_ids):
            return self._fallback.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        for token in self._special:
            if token in text:
                text = text.replace(token, "")
        return ParsedResponse(content=text, reasoning_complete=None)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Previous ids and what the template puts after an answer for `new_messages`, or None."""
        close = self._tokenizer.eos_token_id
        body = (
            previous_completion_ids[:-1]
            if previous_completion_ids[-1:] == [close]
            else previous_completion_ids
        )
        roles = {message.get("role") for message in new_messages}
        if self._treats_reasoning or close is None or close in body or not roles or roles - {"user", "tool"}:
            return None
        opening = _placeholder(new_messages)
        try:
            texts = self._texts([*opening, *new_messages], len(opening), tools, True)
        except TemplateError:  # the template refuses the placeholder conversation; a fresh render may do
            return None
        if texts is None or UNKNOWN_TOOL in texts[-1][len(texts[0]) :]:
            return None
        closed = texts[0].rfind(self._tokenizer.eos_token)
        if closed < 0:
            return None
        ids, indices = self._attribute(texts, len(new_messages), closed + len(self._tokenizer.eos_token))
        previous = [*previous_prompt_ids, *body, close]
        return _rendered([*previous, *ids], [-1] * len(previous) + indices, new_messages)

    def _texts(
        self, messages: list[Any], start: int, tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[str] | None:
        """The text before message `start`, after each message from there, and after the generation prompt.

        None when one of them does not begin with the one before it.
        """
        texts = [self._apply(messages[:start], tools, False)] if start else [""]
        texts += [self._apply(messages[: n + 1], tools, False) for n in range(start, len(messages))]
        texts.append(self._apply(messages, tools, True) if add_generation_prompt else texts[-1])
        pairs = itertools.pairwise(texts)
        return texts if all(longer.startswith(shorter) for shorter, longer in pairs) else None

    def _attribute(self, texts: list[str], num_messages: int, skip_chars: int) -> tuple[list[int], list[int]]:
        """Ids of the last text from `skip_chars` on, and the message that each belongs to."""
        encoding = self._encoder.encode(texts[-1], add_special_tokens=False)
        ids, indices, message = [], [], 0
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if start < skip_chars:
                continue
            while message < num_messages and start >= len(texts[message + 1]):
                message += 1
            ids.append(token)
            indices.append(-1 if message == num_messages or start < len(texts[0]) else message)
        return ids, indices

    def _apply(self, messages: Sequence[Any], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        options = dict(self.config.model_extra or {})
        if tools is not None:
            options["tools"] = tools
        return self._tokenizer.apply_chat_template(
            [_with_parsed_arguments(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )

    def _prompt_opens_reasoning(self, prompt_ids: list[int] | None) -> bool:
        if not prompt_ids:
            return False
        start = len(prompt_ids)
        while start and prompt_ids[start - 1] not in self._stop_ids:
            start -= 1
        return "<think>" in self._decode(prompt_ids[start:])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _rendered(ids: list[int], indices: list[int], messages: list[Any]) -> RenderedTokens:
    return RenderedTokens(
        token_ids=ids,
        message_indices=indices,
        message_roles=[message.get("role") or "" for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )


def _placeholder(new_messages: list[Any]) -> list[dict[str, Any]]:
    """A question and an answer (with the tool calls that `new_messages` answer) to render a tail behind."""
    calls = [
        {
            "id": message.get("tool_call_id") or "call",
            "type": "function",
            "function": {"name": UNKNOWN_TOOL, "arguments": {}},
        }
        for message in new_messages
        if message.get("role") == "tool"
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": "."}
    return [{"role": "user", "content": "."}, {**answer, "tool_calls": calls} if calls else answer]


def _with_parsed_arguments(message: Any) -> Any:
    """Tool-call arguments as objects: several templates iterate over them."""
    if message.get("role") != "assistant" or not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call  # not JSON: the template shows it as the model wrote it
