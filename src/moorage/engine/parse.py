"""What an engine answered: from the bytes of a `/inference/v1/generate` reply to arrays. Pure.

Owns the meaning of the reply's fields (docs/protocols.md section 3). Promises:

- the log-probability of a sampled token is looked up by its id, never by rank; absent, the sentinel -9999,
  not finite or contradictory means unusable: nan, and counted (field of `Completion`);
- a head has unique ids, likeliest first; the sampled token's extra entry is in it only when it belongs there;
- every per-token array has the length of the completion, or the reply is refused.

Does not know sessions, retries or versions of the policy beyond the labels it reads.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from moorage.core.errors import EngineError

SENTINEL = -9999.0
"""What vLLM sends for minus infinity, not-a-number and a missing entry."""

VersionSpan = tuple[int | None, int, int]


@dataclass(frozen=True)
class Completion:
    """One model call's answer. S sampled tokens, P prompt tokens.

    `logprobs`: float32 [S], nan where unusable (`num_unusable` of them). `routed_experts`: uint8 or uint16
    [P - routed_start + S - 1, layers, k]. `mask_counts`, `mask_ids`: int32 [S] and [sum], the kept set of
    each token. `head_ids`, `head_logprobs`: int32 and float32 [S, k], padded with -1 and -inf.
    `weight_versions`: (version, first token, end) of each part; the version of unlabelled weights is None.
    """

    request_id: str
    token_ids: list[int]
    logprobs: np.ndarray
    num_unusable: int
    finish_reason: str
    stop_reason: int | str | None
    routed_experts: np.ndarray | None
    routed_start: int
    mask_counts: np.ndarray | None
    mask_ids: np.ndarray | None
    head_ids: np.ndarray | None
    head_logprobs: np.ndarray | None
    weight_versions: tuple[VersionSpan, ...]
    num_prompt_tokens: int
    cached_tokens: int | None


def parse_completion(
    body: bytes, *, num_prompt_tokens: int, routed_start: int = 0, head_k: int = 0
) -> Completion:
    """The completion in a reply's `body`. Raises EngineError for a reply that is not in the agreed form."""
    try:
        reply = orjson.loads(body)
        choice = reply["choices"][0]
        token_ids = choice["token_ids"]
        reason = choice["finish_reason"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise malformed(f"no completion in it ({type(error).__name__}: {error})") from None
    if not all(type(token) is int for token in token_ids):
        raise malformed("token_ids holds something that is not an id")
    entries = _entries(choice.get("logprobs"), len(token_ids))
    mask_counts, mask_ids = _masks(choice.get("sampling_mask"), len(token_ids))
    logprobs = _sampled_logprobs(entries, token_ids)
    if mask_counts is not None and mask_ids is not None:
        _void_outside_mask(logprobs, token_ids, mask_counts, mask_ids)
    head_ids, head_logprobs = _heads(entries, token_ids, head_k) if head_k else (None, None)
    usage = reply.get("usage") or {}
    return Completion(
        request_id=str(reply.get("request_id") or ""),
        token_ids=token_ids,
        logprobs=logprobs,
        num_unusable=int(np.isnan(logprobs).sum()),
        finish_reason=reason or "",
        stop_reason=choice.get("stop_reason"),
        routed_experts=_routed(
            choice.get("routed_experts"), num_prompt_tokens - routed_start + len(token_ids) - 1
        ),
        routed_start=routed_start,
        mask_counts=mask_counts,
        mask_ids=mask_ids,
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        weight_versions=parse_versions(choice.get("weight_versions"), len(token_ids)),
        num_prompt_tokens=num_prompt_tokens,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def malformed(what: str) -> EngineError:
    """The error for a reply in another form than docs/protocols.md section 3."""
    return EngineError(f"the engine's reply is not in the agreed form: {what}")


def parse_version_label(label: Any) -> int | None:
    """A weight label as a policy version: `default` (never labelled) is None."""
    if label is None or label == "default":
        return None
    try:
        return int(label)
    except (TypeError, ValueError):
        raise malformed(f"weight version {label!r} is no number") from None


def parse_versions(spans: Any, num_tokens: int) -> tuple[VersionSpan, ...]:
    """The spans of `weight_versions`, checked to cover the completion without a gap."""
    if not spans:
        return ()
    try:
        parsed = tuple((parse_version_label(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
    except (KeyError, TypeError, ValueError) as error:
        raise malformed(f"weight_versions {spans!r} ({type(error).__name__})") from None
    position = 0
    for _, start, end in parsed:
        if start != position or end < start:
            raise malformed(f"weight_versions {spans!r} leave a gap at token {position}")
        position = end
    if position != num_tokens:
        raise malformed(f"weight_versions end at token {position} of {num_tokens}")
    return parsed


def _entries(logprobs: Any, num_tokens: int) -> list[dict[str, Any]]:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if content is None:
        content = []
    if len(content) != num_tokens:
        raise malformed(f"{len(content)} log-probabilities for {num_tokens} tokens")
    return content


def _sampled_logprobs(entries: list[dict[str, Any]], token_ids: list[int]) -> np.ndarray:
    values = [
        _lookup(entry, token)
        if entry.get("top_logprobs") or entry.get("token_id") != token
        else _usable(entry)
        for entry, token in zip(entries, token_ids, strict=True)
    ]
    return np.array(values, dtype=np.float32)


def _usable(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    if not isinstance(value, float | int) or not math.isfinite(value) or value <= SENTINEL:
        return math.nan
    return value


def _lookup(entry: dict[str, Any], token: int) -> float:
    """The one usable value listed for `token`; nan when there is none, or two that differ."""
    found = math.nan
    for candidate in (entry, *(entry.get("top_logprobs") or ())):
        if candidate.get("token_id") != token:
            continue
        value = _usable(candidate)
        if math.isnan(found):
            found = value
        elif not math.isnan(value) and abs(value - found) > 1e-4:
            return math.nan
    return found


def _heads(entries: list[dict[str, Any]], token_ids: list[int], head_k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(entries), head_k), -1, dtype=np.int32)
    logprobs = np.full((len(entries), head_k), -np.inf, dtype=np.float32)
    for row, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        head = _head(entry.get("top_logprobs") or (), token, head_k)
        ids[row, : len(head)] = list(head)
        logprobs[row, : len(head)] = list(head.values())
    return ids, logprobs


def _head(listed: Any, token: int, head_k: int) -> dict[int, float]:
    """The `head_k` likeliest distinct ids of those listed, the sampled token first among them whatever its
    rank; it yields its place in a tie."""
    values: dict[int, float] = {}
    for item in listed:
        value = _usable(item)
        if not math.isnan(value):
            values.setdefault(item["token_id"], value)
    ranked = sorted(values.items(), key=lambda pair: (-pair[1], pair[0] == token and len(values) > head_k))
    return dict(ranked[:head_k])


def _masks(masks: Any, num_tokens: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    if masks is None:
        return None, None
    if len(masks) != num_tokens:
        raise malformed(f"{len(masks)} sampling masks for {num_tokens} tokens")
    counts = np.fromiter((len(row) for row in masks), dtype=np.int32, count=num_tokens)
    flat = [token for row in masks for token in row]
    return counts, np.array(flat, dtype=np.int32)


def _void_outside_mask(
    logprobs: np.ndarray, token_ids: list[int], counts: np.ndarray, ids: np.ndarray
) -> None:
    """A sampled token that its own kept set lacks cannot have been drawn from it: unusable."""
    hits = np.repeat(np.array(token_ids, dtype=np.int32), counts) == ids
    owner = np.repeat(np.arange(len(counts)), counts)
    kept = np.bincount(owner[hits], minlength=len(counts)) > 0
    logprobs[~kept] = np.nan


def _routed(encoded: Any, num_rows: int) -> np.ndarray | None:
    if encoded is None:
        return None
    try:
        rows = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, TypeError, ValueError, EOFError) as error:
        raise malformed(f"routed_experts is no base64 of a .npy array ({error})") from None
    if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16):
        raise malformed(f"routed_experts of shape {rows.shape} and dtype {rows.dtype}")
    if len(rows) != num_rows:
        raise malformed(f"{len(rows)} routed_experts rows where {num_rows} were due")
    return rows
