"""One model call: token ids in, `Completion` out, over an engine's `/inference/v1/generate`.

Owns the HTTP session of this process and how many calls each engine has from here. Promises:

- a call ends by its deadline: with a completion, an EngineError, or its cancellation;
- a cancelled or late call is aborted in the engine: its connection is closed and its id is aborted;
- the load of an engine falls in a finally, whatever the ending;
- a request is sent again only while the deadline allows and only when no answer to it was read: the
  connection failed, or the engine refused before it began (429, 503). Another attempt has another id.

Does not know messages, episodes or versions; the version labels in a completion are the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from moorage.core.errors import EngineError
from moorage.core.log import get_logger
from moorage.engine.connection import open_session, refusal
from moorage.engine.parse import Completion, parse_completion

log = get_logger(__name__)

ENGINE_ID_PREFIX = "generate-tokens-"
"""The engine knows request `x` by this prefix and `x`; aborts name it so."""

ABORT_TIMEOUT_S = 2.0
LOOK_UP_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 2.0
INLINE_BYTES = 256 << 10
"""Replies up to this size parse in a few milliseconds; larger ones (top-k heads) leave the event loop."""


class PromptTooLongError(EngineError):
    """The prompt leaves no room for a token within the engine's `max_model_len`."""


@dataclass(frozen=True)
class GenerateCall:
    """One call. `sampling`: the engine's sampling parameters as they are (temperature, top_k, max_tokens,
    stop_token_ids and so on); log-probabilities are always asked for.

    `deadline_s` counts from now. `session_id` keeps the turns of a conversation together at a router.
    `cache_salt` separates prefix caches. `routed_experts_prompt_start`: first prompt token to return routing
    rows for. `head_k`: size of the top-k head of each sampled token, 0 for none.
    """

    url: str
    model: str
    token_ids: Sequence[int]
    sampling: dict[str, Any]
    request_id: str
    deadline_s: float
    session_id: str | None = None
    cache_salt: str | None = None
    routed_experts_prompt_start: int = 0
    head_k: int = 0


@dataclass
class GenerateStats:
    """What this process has seen. `unusable_tokens`: sampled tokens without a usable log-probability."""

    calls: int = 0
    retries: int = 0
    aborts: int = 0
    tokens: int = 0
    unusable_tokens: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)


class GenerateClient:
    """Calls engines. One per process; bound to the event loop of its first call."""

    def __init__(self, *, retry_s: float = 60.0) -> None:
        """`retry_s`: how long an engine that cannot be reached is tried before the call fails."""
        self.stats = GenerateStats()
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
        self._context_length: dict[tuple[str, str], int | None] = {}
        self._looking_up: dict[tuple[str, str], asyncio.Lock] = {}

    async def generate(self, call: GenerateCall) -> Completion:
        """Run `call`. Raises PromptTooLongError, or EngineError with the engine's status and whether a later
        try could help."""
        loads = self.stats.in_flight
        loads[call.url] = loads.get(call.url, 0) + 1
        self.stats.calls += 1
        try:
            completion = await self._until_deadline(call)
        finally:
            loads[call.url] -= 1
        self.stats.tokens += len(completion.token_ids)
        self.stats.unusable_tokens += completion.num_unusable
        return completion

    async def context_length(self, url: str, model: str) -> int | None:
        """`max_model_len` of `model` at `url`; None when the engine does not say."""
        key = (url, model)
        if key in self._context_length:
            return self._context_length[key]
        async with self._looking_up.setdefault(key, asyncio.Lock()):
            if key not in self._context_length:
                await self._look_up(url)
            return self._context_length.get(key)

    def forget_engines(self) -> None:
        """From here on other engines may answer at the same urls, with other limits."""
        self._context_length.clear()

    async def close(self) -> None:
        """Close the connections. Calls still running fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The one session."""
        if self._session is None:
            self._session = open_session()
        return self._session

    async def _until_deadline(self, call: GenerateCall) -> Completion:
        try:
            async with asyncio.timeout(call.deadline_s):
                limit = await self.context_length(call.url, call.model)
                if limit is not None and len(call.token_ids) >= limit:
                    raise PromptTooLongError(
                        f"prompt of {len(call.token_ids)} tokens does not fit max_model_len {limit} of "
                        f"{call.model}; shorten it or raise inference.max_model_len",
                        status=400,
                    )
                return await self._with_retries(call)
        except TimeoutError:
            raise EngineError(
                f"engine {call.url} did not complete request {call.request_id} within {call.deadline_s:g} s"
            ) from None

    async def _with_retries(self, call: GenerateCall) -> Completion:
        loop = asyncio.get_running_loop()
        unreachable_since: float | None = None
        attempt = 0
        while True:
            request_id = call.request_id if attempt == 0 else f"{call.request_id}.{attempt}"
            try:
                return await self._attempt(call, request_id)
            except EngineError as error:
                if not error.retryable:
                    raise
                if error.status is not None:
                    unreachable_since = None
                elif unreachable_since is None:
                    unreachable_since = loop.time()
                elif loop.time() - unreachable_since > self._retry_s:
                    raise
                log.debug("%s; trying again", error)
            attempt += 1
            self.stats.retries += 1
            await asyncio.sleep(min(0.05 * 2 ** min(attempt, 8), MAX_BACKOFF_S))

    async def _attempt(self, call: GenerateCall, request_id: str) -> Completion:
        try:
            body = await self._post(call, request_id)
        except asyncio.CancelledError:  # by whoever awaits, or by the deadline
            await self._abort(call.url, request_id)
            raise
        completion = await self._parse(call, body)
        if completion.finish_reason == "abort":
            raise EngineError(
                f"engine {call.url} aborted request {request_id} after {len(completion.token_ids)} tokens"
            )
        return completion

    async def _post(self, call: GenerateCall, request_id: str) -> bytes:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        if call.session_id:
            headers["X-Session-ID"] = call.session_id
        try:
            async with self.session.post(
                f"{call.url}/inference/v1/generate", data=make_body(call), headers=headers
            ) as answer:
                body = await answer.read()
        except aiohttp.ClientError as error:
            raise EngineError(
                f"engine {call.url} cannot be reached ({type(error).__name__}: {error})", retryable=True
            ) from None
        if answer.status != 200:
            raise refusal(call.url, answer.status, body)
        return body

    async def _parse(self, call: GenerateCall, body: bytes) -> Completion:
        def parse() -> Completion:
            return parse_completion(
                body,
                num_prompt_tokens=len(call.token_ids),
                routed_start=call.routed_experts_prompt_start,
                head_k=call.head_k,
            )

        return parse() if len(body) <= INLINE_BYTES else await asyncio.to_thread(parse)

    async def _abort(self, url: str, request_id: str) -> None:
        """Best effort within 2 s: the closed connection makes the engine abort as well."""
        self.stats.aborts += 1
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                asyncio.timeout(ABORT_TIMEOUT_S),
                self.session.post(
                    f"{url}/abort_requests", json={"request_ids": [ENGINE_ID_PREFIX + request_id]}
                ) as answer,
            ):
                await answer.read()

    async def _look_up(self, url: str) -> None:
        """Ask for `max_model_len`. An engine that cannot say it now is asked again by the next call."""
        with contextlib.suppress(
            aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError
        ):
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S), self.session.get(f"{url}/v1/models") as answer:
                for card in orjson.loads(await answer.read())["data"]:
                    self._context_length[url, card["id"]] = card.get("max_model_len")


def make_body(call: GenerateCall) -> bytes:
    """The JSON body of a call. Unset sampling parameters are left to the engine."""
    sampling = {key: value for key, value in call.sampling.items() if value is not None}
    # One more than the head: a sampled token outside it is listed first and takes a place.
    sampling["logprobs"] = call.head_k + 1
    if call.head_k:
        sampling["flat_logprobs"] = True  # vLLM then keeps them in arrays, which costs it far less
    # Without stop strings nobody needs text: vLLM then decodes none of the K + 1 candidates per token.
    sampling["detokenize"] = bool(sampling.get("stop"))
    if call.routed_experts_prompt_start:
        sampling["routed_experts_prompt_start"] = call.routed_experts_prompt_start
    body: dict[str, Any] = {
        "model": call.model,
        "token_ids": list(call.token_ids),
        "sampling_params": sampling,
    }
    if call.cache_salt:
        body["cache_salt"] = call.cache_salt
    return orjson.dumps(body)
