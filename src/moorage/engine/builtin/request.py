"""What one model call asks for, and what is known of it so far.

`SamplingParams` are vLLM's, as far as this engine carries them out; a parameter that would change the
result and is not carried out is refused, never ignored. `Request` is the scheduler's own mutable record: it
is touched by the engine thread only, until the scheduler hands it back with a `finish_reason`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

MIN_TEMPERATURE = 0.01
ABSENT_LOGPROB = -9999.0
"""What the wire carries for minus infinity."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "prompt_logprob_token_ids": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "best_of": (1,),
    "use_beam_search": (False,),
}
"""Parameters this engine does not carry out, with the values that ask for nothing."""


class RequestError(Exception):
    """The request cannot be served as it is. `status` is the HTTP status to answer with."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True):
    """vLLM's sampling parameters. `temperature` 0 is greedy: it ignores top_k, top_p and min_p."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    routed_experts_prompt_start: Annotated[int, msgspec.Meta(ge=0)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether the sampled distribution can leave tokens out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def parse_sampling(data: Any) -> SamplingParams:
    """`data` (JSON object) as parameters. Raises RequestError naming the key and its value."""
    if not isinstance(data, dict):
        raise RequestError("sampling_params must be an object", param="sampling_params")
    given = {key: value for key, value in data.items() if value is not None}
    for key, neutral in _NEUTRAL.items():
        if key in given and given[key] not in neutral:
            raise RequestError(
                f"{key} is not supported by the built-in engine (given: {given[key]!r}); leave it out",
                param=key,
            )
    try:
        params = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}", param="sampling_params") from None
    if 0 < params.temperature < MIN_TEMPERATURE:
        params = msgspec.structs.replace(params, temperature=MIN_TEMPERATURE)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens {params.min_tokens} is greater than max_tokens {params.max_tokens}",
            param="min_tokens",
        )
    return params


class Wish(NamedTuple):
    """What a request asks of the sampler."""

    temperature: float
    """0: greedy."""
    top_k: int
    top_p: float
    min_p: float
    ranks: bool
    head_k: int
    mask: bool


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated.

    `prompt` + `out` are all tokens known; the last one of `out` has not been fed to the model yet.
    `versions` holds (label, first output token) pairs. `reported_rows` are routing rows saved before the
    cache was recomputed under other weights: a row belongs to the weights that sampled the token after it.
    """

    id: str
    prompt: np.ndarray
    params: SamplingParams
    stop_ids: frozenset[int]
    eos_id: int | None
    """The end token that is no `stop_reason`; None when it does not end this request."""
    limit: int
    """Most tokens to generate."""
    salt: str = ""
    seed: int = 0
    head_k: int = 0
    """How many of the likeliest tokens to report beside each drawn one."""
    want_mask: bool = False
    streams: bool = False
    """Hand over after every token, not only at the end."""

    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    head_ids: list[np.ndarray] = field(default_factory=list)
    head_logprobs: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    computed_epoch: int = -1
    """Epoch of the weights that wrote every key in the cache; -1 when several did."""
    reported_rows: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    arrived_s: float = 0.0
    first_token_s: float = 0.0
    wish: Wish = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        cut = (0, 1.0, 0.0) if p.greedy else (p.top_k, p.top_p, p.min_p)
        self.wish = Wish(p.temperature, *cut, p.logprobs is not None, self.head_k, self.want_mask)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.out)

    def known(self) -> np.ndarray:
        """All tokens so far, int64."""
        if not self.out:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.out, dtype=np.int64)])

    def spans(self) -> list[tuple[str, int, int]]:
        """(label, start, end) over the output tokens, contiguous; equal neighbours joined, empty ones left
        out."""
        starts = [*(start for _, start in self.versions), len(self.out)]
        spans: list[tuple[str, int, int]] = []
        for (label, start), end in zip(self.versions, starts[1:], strict=True):
            if end <= start:
                continue
            if spans and spans[-1][0] == label:
                spans[-1] = (label, spans[-1][1], end)
            else:
                spans.append((label, start, end))
        return spans
