"""From a micro batch of references and their fetched arrays to the arrays one forward pass needs. Pure numpy.

Promises:
- sequences lie in packing order; every field of a sample is cut to its slice by the one `cut`, so token i of
  every field is the same token, and the bytes are those the worker encoded;
- an optional array that some sample lacks is empty there (no kept set, padded head rows); routing rows are
  there for all samples or for none;
- tokens outside every span of credit, padding, dummies and lost micro batches train on nothing;
- a lost micro batch (`placeholder`) has the same shape and repeats real routing rows, never zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moorage.core.errors import PayloadError
from moorage.payload.codec import BranchArrays, cut
from moorage.records.sample import MicroBatch, TrainSample

PAD_TOKEN = 1


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """T packed tokens. `seq_lens` add up to T; `positions` start at 0 in each sequence.

    `loss_mask` marks tokens that the policy may train; they have one row each in the head. `advantages` and
    the three weights are 0 outside spans. `routed_experts` [T, layers, k]; `sampling`: counts [T] (0: not
    truncated) and flat ids; `head`: ids and log-probabilities [loss_mask.sum(), k], padded with -1, -inf.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    temperatures: np.ndarray
    advantages: np.ndarray
    rl_weights: np.ndarray
    ce_weights: np.ndarray
    ref_kl_weights: np.ndarray
    seq_lens: np.ndarray
    routed_experts: np.ndarray | None = None
    sampling: tuple[np.ndarray, np.ndarray] | None = None
    head: tuple[np.ndarray, np.ndarray] | None = None
    content_mask: np.ndarray | None = None
    dropped: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def assemble(
    micro: MicroBatch, payloads: Mapping[str, BranchArrays | PayloadError], *, pad_multiple: int = 1
) -> Assembled:
    """Pack the micro batch's samples. Raises PayloadError when a payload is missing, failed or does not fit.

    `pad_multiple`: T becomes a multiple of it; padding belongs to the last sequence and trains on nothing.
    """
    if not micro.samples:
        raise PayloadError("a micro batch without samples cannot be assembled")
    parts = [_arrays_of(sample, payloads) for sample in micro.samples]
    lens = np.array([part.num_tokens for part in parts], np.int32)
    pad = -int(lens.sum()) % pad_multiple
    credit = [_spread_credit(sample, part) for sample, part in zip(micro.samples, parts, strict=True)]
    if micro.dummy:
        credit = [np.zeros_like(rows) for rows in credit]
    weights = np.concatenate([*credit, np.zeros((4, pad), np.float32)], axis=1)
    loss_mask = _join([part.loss_mask for part in parts], pad, 0).astype(np.bool_)
    lens, positions = _pad_lens(lens, pad)
    return Assembled(
        token_ids=_join([part.token_ids for part in parts], pad, PAD_TOKEN),
        positions=positions,
        loss_mask=np.zeros_like(loss_mask) if micro.dummy else loss_mask,
        logprobs=_join([part.logprobs for part in parts], pad, 0),
        temperatures=_temperatures(micro.samples, pad),
        advantages=weights[0],
        rl_weights=weights[1],
        ce_weights=weights[2],
        ref_kl_weights=weights[3],
        seq_lens=lens,
        routed_experts=_join_routing([part.routed_experts for part in parts], pad),
        sampling=None if micro.dummy else _join_sampling(parts, pad),
        head=None if micro.dummy else _join_head(parts),
        content_mask=_join_content(parts, pad),
    )


def placeholder(
    micro: MicroBatch,
    payloads: Mapping[str, BranchArrays | PayloadError] | None = None,
    *,
    donor: np.ndarray | None = None,
    pad_multiple: int = 1,
) -> Assembled:
    """A micro batch of the same shape that trains on nothing (`dropped` unless it is a dummy).

    Routing rows repeat those of the payloads that did arrive, else `donor` rows [n, layers, k] of another
    micro batch, else the first k experts in every row.
    """
    lens = np.array([sample.num_tokens for sample in micro.samples], np.int32)
    pad = -int(lens.sum()) % pad_multiple
    num_tokens = int(lens.sum()) + pad
    lens, positions = _pad_lens(lens, pad)
    zeros = np.zeros(num_tokens, np.float32)
    return Assembled(
        token_ids=np.full(num_tokens, PAD_TOKEN, np.int32),
        positions=positions,
        loss_mask=np.zeros(num_tokens, np.bool_),
        logprobs=zeros,
        temperatures=np.ones(num_tokens, np.float32),
        advantages=zeros,
        rl_weights=zeros,
        ce_weights=zeros,
        ref_kl_weights=zeros,
        seq_lens=lens,
        routed_experts=_repeat_routing(micro, payloads or {}, donor, num_tokens),
        dropped=not micro.dummy,
    )


def _arrays_of(sample: TrainSample, payloads: Mapping[str, BranchArrays | PayloadError]) -> BranchArrays:
    payload = payloads.get(sample.payload.id)
    if isinstance(payload, PayloadError):
        raise payload
    if payload is None:
        raise PayloadError(f"payload {sample.payload.id} was not fetched")
    return cut(payload, sample.num_tokens)


def _spread_credit(sample: TrainSample, arrays: BranchArrays) -> np.ndarray:
    """Rows: advantage, rl, ce, ref_kl; one column per token. `ce` covers all tokens of its span."""
    rows = np.zeros((4, arrays.num_tokens), np.float32)
    mask = arrays.loss_mask.astype(np.float32)
    for span in sample.spans:
        if not 0 <= span.start <= span.stop <= arrays.num_tokens:
            raise PayloadError(
                f"credit span {span.start}:{span.stop} of payload {sample.payload.id} lies outside the "
                f"{arrays.num_tokens} tokens that are kept"
            )
        at = slice(span.start, span.stop)
        if span.advantage is None and span.rl and mask[at].any():
            raise PayloadError(
                f"credit span {span.start}:{span.stop} of payload {sample.payload.id} has rl weight "
                f"{span.rl:g} but no advantage; unassigned credit needs rl = 0"
            )
        rows[0, at] = mask[at] * (span.advantage or 0.0)
        rows[1, at] = mask[at] * span.rl
        rows[2, at] = span.ce
        rows[3, at] = mask[at] * span.ref_kl
    return rows


def _join(parts: Sequence[np.ndarray], pad: int, value: float) -> np.ndarray:
    tail = [np.full((pad, *parts[0].shape[1:]), value, parts[0].dtype)] if pad else []
    return np.concatenate([*parts, *tail])


def _pad_lens(lens: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths with the padding in the last sequence, and positions (padding counts from 0)."""
    ranges = [np.arange(n, dtype=np.int32) for n in (*lens.tolist(), pad)]
    padded = lens.copy()
    padded[-1] += pad
    return padded, np.concatenate(ranges)


def _temperatures(samples: Sequence[TrainSample], pad: int) -> np.ndarray:
    values = [np.full(sample.num_tokens, sample.temperature, np.float32) for sample in samples]
    return np.concatenate([*values, np.ones(pad, np.float32)])


def _join_routing(rows: Sequence[np.ndarray | None], pad: int) -> np.ndarray | None:
    present = [part for part in rows if part is not None]
    if not present:
        return None
    if len(present) != len(rows) or len({part.shape[1:] for part in present}) != 1:
        raise PayloadError("samples with different routing shapes, or with and without, share a micro batch")
    joined = np.concatenate(present)  # uint8 and uint16 join as uint16
    if not pad:
        return joined
    return np.concatenate([joined, np.repeat(joined[-1:], pad, axis=0)])


def _join_sampling(parts: Sequence[BranchArrays], pad: int) -> tuple[np.ndarray, np.ndarray] | None:
    if all(part.sampling_counts is None for part in parts):
        return None
    counts = [
        np.zeros(part.num_tokens, np.int32) if part.sampling_counts is None else part.sampling_counts
        for part in parts
    ]
    ids = [part.sampling_ids for part in parts if part.sampling_ids is not None]
    return _join(counts, pad, 0), np.concatenate(ids)


def _join_head(parts: Sequence[BranchArrays]) -> tuple[np.ndarray, np.ndarray] | None:
    widths = [part.head_ids.shape[1] for part in parts if part.head_ids is not None]
    if not widths:
        return None
    num_rows = sum(part.num_trainable for part in parts)
    ids = np.full((num_rows, max(widths)), -1, np.int32)
    logprobs = np.full((num_rows, max(widths)), -np.inf, np.float32)
    at = 0
    for part in parts:
        if part.head_ids is not None and part.head_logprobs is not None:
            rows, width = part.head_ids.shape
            ids[at : at + rows, :width] = part.head_ids
            logprobs[at : at + rows, :width] = part.head_logprobs
        at += part.num_trainable
    return ids, logprobs


def _join_content(parts: Sequence[BranchArrays], pad: int) -> np.ndarray | None:
    if all(part.content_mask is None for part in parts):
        return None
    masks = [
        np.zeros(part.num_tokens, np.uint8) if part.content_mask is None else part.content_mask
        for part in parts
    ]
    return _join(masks, pad, 0).astype(np.bool_)


def _repeat_routing(
    micro: MicroBatch,
    payloads: Mapping[str, BranchArrays | PayloadError],
    donor: np.ndarray | None,
    num_tokens: int,
) -> np.ndarray | None:
    shape = micro.routing
    if shape is None:
        return None
    arrived = [payloads.get(sample.payload.id) for sample in micro.samples]
    rows = [part.routed_experts for part in arrived if isinstance(part, BranchArrays)]
    real = [
        part for part in (*rows, donor) if part is not None and len(part) and part.shape[1:] == tuple(shape)
    ]
    source = real[0] if real else np.broadcast_to(np.arange(shape[1], dtype=np.uint8), (1, *shape))
    return np.resize(source, (num_tokens, *shape))
