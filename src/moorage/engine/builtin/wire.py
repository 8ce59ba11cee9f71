"""Replies in vLLM 0.33's form (docs/protocols.md section 3). Pure: records in, plain data out."""

from __future__ import annotations

import base64
import io
import math
import time
from typing import Any

import numpy as np

from moorage.engine.builtin.request import ABSENT_LOGPROB, Request


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The error object."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(requests: list[Request]) -> dict[str, Any]:
    """Token counts of the choices of one call (they share a prompt)."""
    prompt = len(requests[0].prompt)
    completion = sum(len(request.out) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": requests[0].cached_tokens,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def generate_reply(
    call_id: str, model: str, requests: list[Request], *, return_prompt: bool
) -> dict[str, Any]:
    """Reply of `/inference/v1/generate` in tokens mode; null fields are present."""
    return {
        "request_id": call_id,
        "model": model,
        "created": int(time.time()),
        "output_mode": "tokens",
        "usage": usage(requests),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": requests[0].prompt.tolist() if return_prompt else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "choices": [choice(index, request) for index, request in enumerate(requests)],
    }


def choice(index: int, request: Request) -> dict[str, Any]:
    """One choice of `/inference/v1/generate`."""
    return {
        "index": index,
        "token_ids": request.out,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "logprobs": None if request.params.logprobs is None else {"content": logprob_content(request)},
        "routed_experts": None if request.routed_experts is None else encode_array(request.routed_experts),
        "sampling_mask": [mask.tolist() for mask in request.masks] if request.want_mask else None,
        "weight_versions": [
            {"version": version, "start": start, "end": end} for version, start, end in request.spans()
        ]
        or None,
    }


def logprob_content(request: Request) -> list[dict[str, Any]]:
    """Per output token: id, log-probability, rank, and the head: the drawn token first, then the others by
    rank.

    As vLLM does, `logprobs: K` gives K entries, so that K - 1 others are listed where the drawn token is not
    among the likeliest K.
    """
    asked = request.params.logprobs or 0
    size = max(1, asked) if asked >= 0 else None
    content = []
    for at in range(len(request.out)):
        drawn = drawn_entry(request, at)
        others = [entry for entry in head_entries(request, at) if entry["token_id"] != drawn["token_id"]]
        content.append({**drawn, "top_logprobs": [drawn, *others][:size]})
    return content


def drawn_entry(request: Request, at: int) -> dict[str, Any]:
    """The drawn token at output position `at`."""
    return _entry(request.out[at], request.logprobs[at], request.ranks[at])


def head_entries(request: Request, at: int) -> list[dict[str, Any]]:
    """The likeliest tokens at output position `at`, by rank."""
    if not request.head_ids:
        return []
    pairs = zip(request.head_ids[at].tolist(), request.head_logprobs[at].tolist(), strict=True)
    return [_entry(token, value, rank) for rank, (token, value) in enumerate(pairs, 1)]


def _entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob if math.isfinite(logprob) else ABSENT_LOGPROB, "rank": rank}


def encode_array(array: np.ndarray) -> str:
    """Base64 of the bytes of `np.save`."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def model_list(name: str, path: str, max_model_len: int, created: int) -> dict[str, Any]:
    """Reply of `/v1/models`."""
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moorage",
        "root": path,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return {"object": "list", "data": [card]}
