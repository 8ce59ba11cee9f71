"""What the routes share: the served model, its engine thread, and making requests from parsed bodies."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerFast

from moorage.engine.builtin.request import Request, RequestError, SamplingParams
from moorage.engine.builtin.scheduler import Scheduler
from moorage.engine.builtin.worker import EngineThread

FORBIDDEN_SALT = frozenset("@/\\\0")


@dataclass(slots=True)
class Service:
    """One served model. `seed` makes the seeds of requests that bring none."""

    scheduler: Scheduler
    name: str
    path: str
    max_model_len: int
    sampling_mask: bool = False
    seed: int = 0
    tokenizer: PreTrainedTokenizerFast | None = None
    eos_ids: tuple[int, ...] = ()
    """The first is the tokenizer's own."""
    created: int = field(default_factory=lambda: int(time.time()))
    engine: EngineThread = field(init=False)
    counts: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    _seeds: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.engine = EngineThread(self.scheduler)
        self._seeds = np.random.default_rng(self.seed)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) for a model that is not served."""
        if name and name != self.name:
            raise RequestError(
                f"The model `{name}` does not exist; this engine serves `{self.name}`.",
                status=404,
                param="model",
            )

    def make_requests(
        self,
        call_id: str,
        tokens: Any,
        params: SamplingParams,
        salt: str | None = None,
        *,
        streams: bool = False,
        least_head: int = 2,
    ) -> list[Request]:
        """One request per choice. Raises RequestError naming what is wrong with the call.

        `least_head`: a head of fewer entries is not reported. Of one entry it is the drawn token, mostly.
        """
        prompt = self._check_prompt(tokens)
        self._check_params(params, len(prompt))
        if salt is not None and not (1 <= len(salt) <= 128 and FORBIDDEN_SALT.isdisjoint(salt)):
            raise RequestError(
                f"cache_salt must be 1 to 128 characters without @ / \\ NUL (given: {salt!r})",
                param="cache_salt",
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and the model folder has none", param="stop")
        room = self.max_model_len - len(prompt)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_ids)
        return [
            Request(
                id=call_id if params.n == 1 else f"{call_id}-{index}",
                prompt=prompt,
                params=params,
                stop_ids=stop_ids,
                eos_id=self.eos_ids[0] if self.eos_ids and not params.ignore_eos else None,
                limit=min(params.max_tokens or room, room),
                salt=salt or "",
                seed=self._seed(params, index),
                head_k=self._head_k(params, least_head),
                want_mask=self.sampling_mask and params.truncated,
                streams=streams or bool(params.stop_strings),
                arrived_s=time.monotonic(),
            )
            for index in range(params.n)
        ]

    def _head_k(self, params: SamplingParams, least: int) -> int:
        vocab = self.scheduler.runner.vocab_size
        asked = vocab if params.logprobs == -1 else min(params.logprobs or 0, vocab)
        return asked if asked >= least else 0

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None or params.seed == -1:
            return int(self._seeds.integers(2**63))
        return params.seed + index

    def _check_prompt(self, tokens: Any) -> np.ndarray:
        try:
            ids = msgspec.convert(tokens, list[int])
        except msgspec.ValidationError as error:
            raise RequestError(f"token_ids: {error}", param="token_ids") from None
        if not ids:
            raise RequestError("token_ids must hold at least one token", param="token_ids")
        vocab = self.scheduler.runner.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(token for token in ids if not 0 <= token < vocab)
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab}", param="token_ids")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for a token",
                param="token_ids",
            )
        return np.asarray(ids, dtype=np.int64)

    def _check_params(self, params: SamplingParams, prompt_len: int) -> None:
        vocab = self.scheduler.runner.vocab_size
        if params.routed_experts_prompt_start > prompt_len:
            raise RequestError(
                f"routed_experts_prompt_start {params.routed_experts_prompt_start} is beyond the prompt of "
                f"{prompt_len} tokens",
                param="routed_experts_prompt_start",
            )
        if params.logprobs is not None and params.logprobs > vocab + 1:  # all, and the drawn one
            raise RequestError(
                f"logprobs {params.logprobs} is above the vocabulary of {vocab}", param="logprobs"
            )
        bad = [token for token in params.stop_token_ids if not 0 <= token < vocab]
        if bad:
            raise RequestError(
                f"stop token id {bad[0]} is outside the vocabulary of {vocab}", param="stop_token_ids"
            )


def new_id() -> str:
    """A request id nobody else has."""
    return secrets.token_hex(16)


def load_tokenizer(path: str) -> PreTrainedTokenizerFast | None:
    """The folder's tokenizer, or None when it has none (then there are no chat completions)."""
    if not (Path(path) / "tokenizer.json").is_file():
        return None
    return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)


def end_tokens(path: str, config: Any, tokenizer: PreTrainedTokenizerFast | None) -> tuple[int, ...]:
    """Ids that end a completion: the tokenizer's, then those of generation_config.json or config.json."""
    ids: list[int] = []
    own: Any = None if tokenizer is None else tokenizer.eos_token_id
    if own is not None:
        ids.append(own)
    declared: Any = getattr(config, "eos_token_id", None)
    if (Path(path) / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id or declared
    if declared is not None:
        ids += declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(ids))
