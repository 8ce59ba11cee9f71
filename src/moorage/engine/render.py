"""Messages to token ids and back: a pool of `renderers` renderers over one tokenizer folder.

Owns which renderer a model gets and how many tokenizers this process holds. Promises:

- no torch: the tokenizer is read with `PreTrainedTokenizerFast` (`AutoTokenizer` would import it);
- thread-safe: encoding mutates a fast tokenizer, so each renderer has a lock, and callers on several threads
  get several renderers, up to `max_renderers`;
- a prompt that was rendered lately is not rendered again: the episodes of a group open with the same one;
- `bridge` keeps the previous turn's tokens as they are, or answers None and the caller renders afresh.

Does not know engines, episodes or training.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import orjson
from renderers.base import MODEL_RENDERER_MAP, ParsedResponse, RenderedTokens, Renderer, create_renderer
from renderers.configs import DefaultRendererConfig, config_from_name

from moorage.config.base import suggestion
from moorage.core.errors import ConfigError
from moorage.engine.template import TemplateRenderer

T = TypeVar("T")

REMEMBERED = 128
"""Prompts whose ids are remembered: those of the groups that a process runs at a time."""
INLINE_CHARS = 20_000
"""Text up to this length renders in a few milliseconds at most and stays on the calling thread."""


class RendererPool:
    """Renders, bridges and parses for one model folder."""

    def __init__(self, model_path: str | Path, renderer: str = "auto", *, max_renderers: int = 4) -> None:
        self.model_path = Path(model_path)
        self.renderer = renderer
        self.max_renderers = max_renderers
        self._growing = threading.Lock()
        self._remembered = lru_cache(REMEMBERED)(lambda prompt: self._render(*orjson.loads(prompt)))
        self._slots: list[tuple[Renderer, threading.Lock]] = []
        self._add_slot()
        self.stop_token_ids: list[int] = list(self._slots[0][0].get_stop_token_ids())

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> RenderedTokens:
        """Token ids of the conversation, ending where the assistant's answer begins. Not to be changed."""
        try:
            prompt = orjson.dumps((list(messages), _listed(tools)))
        except TypeError:  # it holds more than text
            prompt = None
        if prompt is None or len(prompt) > INLINE_CHARS:
            return self._render(list(messages), _listed(tools))
        return self._remembered(prompt)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> RenderedTokens:
        with self._hold() as renderer:
            return renderer.render(messages, tools=tools, add_generation_prompt=True)  # type: ignore[arg-type]

    def bridge(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        tail: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RenderedTokens | None:
        """The previous turn's ids, verbatim, extended by the messages of `tail` (user and tool only).

        None when the renderer cannot prove that this equals what the template would have given.
        """
        with self._hold() as renderer:
            return renderer.bridge_to_next_turn(
                previous_prompt_ids,
                previous_completion_ids,
                list(tail),  # type: ignore[arg-type]
                tools=_listed(tools),
            )

    def parse(
        self,
        completion_ids: list[int],
        tools: Sequence[dict[str, Any]] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """The assistant message that the completion spells: content, reasoning, tool calls."""
        with self._hold() as renderer:
            return renderer.parse_response(completion_ids, tools=_listed(tools), prompt_ids=prompt_ids)

    async def run(self, work: Callable[[], T], num_chars: int) -> T:
        """`work()` here when `num_chars` of text take little time, else on a thread."""
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.to_thread(work)

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def _hold(self):
        renderer, lock = self._acquire()
        try:
            yield renderer
        finally:
            lock.release()

    def _acquire(self) -> tuple[Renderer, threading.Lock]:
        for slot in self._slots:
            if slot[1].acquire(blocking=False):
                return slot
        with self._growing:
            if len(self._slots) < self.max_renderers:
                self._add_slot()
        slot = self._slots[threading.get_ident() % len(self._slots)]
        slot[1].acquire()  # unblocked by the thread that renders with it now; a render ends by itself
        return slot

    def _add_slot(self) -> None:
        self._slots.append((make_renderer(self.model_path, self.renderer), threading.Lock()))


def make_renderer(model_path: Path, renderer: str = "auto") -> Renderer:
    """The renderer of a model folder. Raises ConfigError for a folder or a name that cannot work."""
    config = _renderer_config(model_path, renderer)
    tokenizer = load_tokenizer(model_path)
    if isinstance(config, DefaultRendererConfig):
        if not tokenizer.chat_template:
            raise ConfigError(f"{model_path}: the tokenizer has no chat template; name a renderer")
        return TemplateRenderer(tokenizer, config)
    return create_renderer(tokenizer, config)


def load_tokenizer(model_path: Path) -> Any:
    """The fast tokenizer of a model folder, without importing torch."""
    from transformers import PreTrainedTokenizerFast  # late: transformers costs a second to import

    if not (model_path / "tokenizer.json").exists():
        raise ConfigError(f"{model_path}: no tokenizer.json; give a model folder in Hugging Face layout")
    return PreTrainedTokenizerFast.from_pretrained(str(model_path))


def _renderer_config(model_path: Path, renderer: str) -> Any:
    if renderer != "auto":
        try:
            return config_from_name(renderer)
        except (KeyError, ValueError):
            valid = [*sorted(set(MODEL_RENDERER_MAP.values())), "default", "auto"]
            raise ConfigError(f"unknown renderer `{renderer}`{suggestion(renderer, valid)}") from None
    known = MODEL_RENDERER_MAP.get("/".join(model_path.parts[-2:]))
    if known is not None:
        return config_from_name(known)
    path = model_path / "config.json"
    described = json.loads(path.read_text()) if path.exists() else {}
    if any(described.get(key) is not None for key in ("vision_config", "vision_tower", "image_token_id")):
        raise ConfigError(
            f"{model_path} takes images, which its chat template alone cannot carry; name a renderer"
        )
    return DefaultRendererConfig()


def _listed(tools: Sequence[dict[str, Any]] | None) -> Any:
    return list(tools) if tools else None
