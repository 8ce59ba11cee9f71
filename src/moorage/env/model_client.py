"""The policy's model client inside verifiers: messages in, tokens and arrays kept, a message out.

The one seam to verifiers is its interception server's `resolve_client`: a config of class
`MooredClientConfig` gets a `MooredClient`, every other config (frozen or external agents) gets verifiers' own
client.

Promises: a turn that continues a conversation keeps the previous tokens verbatim whenever the renderer can;
routing rows are asked from the first token that has none, one row early on a continued turn; what the graph
cannot carry waits in the `SideTable`; what an engine refuses reaches the harness with the engine's status.
Does not know: episodes, blobs, how an engine is reached.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from renderers.base import ToolCallParseStatus
from verifiers.v1.clients import BaseClientConfig, Client, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, TurnTokens, Usage

from moorage.core.errors import EngineError
from moorage.engine.generate import GenerateCall, GenerateClient, PromptTooLongError
from moorage.engine.parse import Completion
from moorage.engine.render import RendererPool
from moorage.env.direct_call import local_interception
from moorage.env.quicken import quicken
from moorage.env.scratch import scratch
from moorage.env.turns import SideTable, Turn

NOT_AGAIN = 424
"""Status of an engine failure that has none and that a repeated call would only meet again (a deadline)."""
FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}


class MooredClientConfig(TrainClientConfig):
    """Marks a run's own policy: `base_url` is the engine's. Made by `policy_client`, not by people."""


def policy_client(endpoint: str) -> MooredClientConfig:
    """The client config of a run whose engine is at `endpoint` (`http://host:port`)."""
    url = endpoint.rstrip("/").removesuffix("/v1")
    return MooredClientConfig.model_validate({"base_url": url, "api_key_var": "MOORAGE_ENGINE_KEY"})


@dataclass(frozen=True)
class ModelService:
    """What all model clients of a process share."""

    renderers: RendererPool
    engine: GenerateClient
    turns: SideTable
    head_k: int = 0
    request_timeout_s: float = 600.0


@contextmanager
def model_seam(service: ModelService) -> Iterator[None]:
    """While entered, verifiers' interception servers serve `MooredClientConfig` with `service`."""
    original: Callable[[BaseClientConfig], Client] = interception.resolve_client

    def resolve_client(config: BaseClientConfig) -> Client:
        if isinstance(config, MooredClientConfig):
            return MooredClient(config, service)
        return original(config)

    interception.resolve_client = resolve_client
    try:
        yield
    finally:
        interception.resolve_client = original


class MooredClient(Client):
    """Serves the turns of all rollouts of one endpoint."""

    def __init__(self, config: MooredClientConfig, service: ModelService) -> None:
        self._url = config.base_url
        self._service = service

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002 - the engine knows none of them
    ) -> Response:
        """One model call. Raises ProviderError with the status that the harness should see."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the policy speaks chat completions only, not {type(dialect).__name__}; give this agent a "
                "harness of that kind, or a `client` of its own",
                status_code=400,
            )
        if turn is None or session_id is None:
            raise ProviderError("a call outside a rollout cannot be recorded", status_code=400)
        tools = [tool_to_wire(tool) for tool in turn.tools] or None
        prompt = await self._render(turn, session_id, tools)
        completion = await self._generate(prompt, body["model"], sampling, session_id)
        return self._respond(prompt, completion, body["model"], tools, session_id)

    async def _render(self, turn: PendingTurn, trace_id: str, tools: list[dict] | None) -> Prompt:
        pool = self._service.renderers
        tail = [message_to_wire(message) for message in turn.tail]
        previous = turn.previous_renderer_token_ids() if _continues(tail) else None
        if previous is not None:
            prompt_ids, completion_ids = previous
            bridged = await pool.run(
                lambda: pool.bridge(prompt_ids, completion_ids, tail, tools), _num_chars(tail)
            )
            if bridged is not None:
                last = turn.trace.nodes[turn.prefix_node_ids[-1]]
                before = self._service.turns.find(trace_id, last.logprobs)
                return Prompt(
                    list(bridged.token_ids),
                    turn.prompt_message_spans(bridged),
                    bridged.is_content or None,
                    bridged=True,
                    routed_to=0 if before is None else before.routed_to,
                )
        messages = [message_to_wire(message) for message in turn.prompt]
        rendered = await pool.run(lambda: pool.render(messages, tools), _num_chars(messages))
        return Prompt(list(rendered.token_ids), rendered.message_token_spans(), rendered.is_content or None)

    async def _generate(
        self, prompt: Prompt, model: str, sampling: SamplingConfig, trace_id: str
    ) -> Completion:
        service = self._service
        params = sampling.model_dump(exclude_none=True)
        run = service.turns.run_of(trace_id)
        left = service.request_timeout_s if run is None else min(run.remaining_s, service.request_timeout_s)
        call = GenerateCall(
            url=self._url,
            model=model,
            token_ids=prompt.token_ids,
            cache_salt=params.pop("cache_salt", None),
            sampling={
                "stop_token_ids": service.renderers.stop_token_ids,
                "skip_special_tokens": False,
                **params,
            },
            request_id=uuid.uuid4().hex,
            session_id=trace_id,
            deadline_s=max(left, 0.001),
            routed_experts_prompt_start=prompt.routed_to,
            head_k=service.head_k,
        )
        try:
            return await service.engine.generate(call)
        except PromptTooLongError as error:  # in the words by which harnesses know a full window
            raise ProviderError(f"the input exceeds the context window: {error}", status_code=400) from error
        except EngineError as error:
            status = error.status or (503 if error.retryable else NOT_AGAIN)
            raise ProviderError(str(error), status_code=status) from error

    def _respond(
        self, prompt: Prompt, completion: Completion, model: str, tools: list[dict] | None, trace_id: str
    ) -> Response:
        parsed = self._service.renderers.parse(completion.token_ids, tools, prompt.token_ids)
        calls = [
            ToolCall(
                id=call.id or f"call_{index}",
                name=call.name,
                arguments=call.arguments
                if isinstance(call.arguments, str)
                else json.dumps(call.arguments or {}),
            )
            for index, call in enumerate(parsed.tool_calls)
            if call.name and call.status != ToolCallParseStatus.UNKNOWN_TOOL
        ]
        logprobs = completion.logprobs.tolist()
        self._record(prompt, completion, model, trace_id, logprobs)
        response = Response(
            id=completion.request_id,
            created=0,
            model=model,
            message=AssistantMessage(
                content=parsed.content or None,
                reasoning_content=parsed.reasoning_content,
                tool_calls=calls or None,
            ),
            finish_reason=FINISH_REASONS.get(completion.finish_reason),  # type: ignore[arg-type]
            usage=Usage(prompt_tokens=len(prompt.token_ids), completion_tokens=len(completion.token_ids)),
            tokens=TurnTokens.model_construct(
                prompt_ids=prompt.token_ids,
                bridged=prompt.bridged,
                completion_ids=completion.token_ids,
                completion_logprobs=logprobs,
                message_spans=prompt.spans,
                is_content=prompt.is_content,
            ),
        )
        response.raw = serialize_completion(response, model)
        return response

    def _record(
        self, prompt: Prompt, completion: Completion, model: str, trace_id: str, key: list[float]
    ) -> None:
        run = self._service.turns.run_of(trace_id)
        if run is None:
            return
        turn = Turn(
            prompt_len=len(prompt.token_ids),
            logprobs=completion.logprobs,
            versions=completion.weight_versions,
            policy=model == run.model,
            rows=completion.routed_experts,
            rows_start=completion.routed_start,
            mask_counts=completion.mask_counts,
            mask_ids=completion.mask_ids,
            head_ids=completion.head_ids,
            head_logprobs=completion.head_logprobs,
        )
        self._service.turns.record(trace_id, key, turn)


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. `spans`: tokens of each message. `routed_to`: tokens with a routing row already."""

    token_ids: list[int]
    spans: list[tuple[int, int] | None]
    is_content: list[bool] | None
    bridged: bool = False
    routed_to: int = 0


def _continues(tail: Sequence[Mapping[str, Any]]) -> bool:
    """Whether new messages may follow a sampled turn as they are: tool results, then at most one user."""
    roles = [message["role"] for message in tail]
    return bool(roles) and all(role == "tool" for role in roles[:-1]) and roles[-1] in ("tool", "user")


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)


@asynccontextmanager
async def serving(env: vf.Env, service: ModelService) -> AsyncIterator[None]:
    """Hold the environment's shared resources; the policy is served by `service`, direct calls in process."""
    quicken()
    with model_seam(service), scratch(env):
        async with env.serving():
            with local_interception(env._interception):
                yield
