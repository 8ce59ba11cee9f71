"""From logits to tokens: temperature, min-p, top-k, top-p, in vLLM's order, and what is reported of it.

The distribution that a token is drawn from is the one that is reported ("processed" log-probabilities):
log_softmax in float32 of the logits after division by the temperature, over the kept set only. Greedy rows
are not divided and not truncated.

Drawing is by inverse distribution function from one uniform number per token, which is a hash of (seed of the
request, index of the token). So a request's tokens depend on its own seed and on nothing else in the batch,
and a request continued after a pause draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from moorage.engine.builtin.request import Wish

REMEMBERED_PLANS = 64
NO_TOP_P = 2.0
"""Above any rounded cumulated share, so that a row without top-p loses nothing beside one with it."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def hash_seed(seed: int) -> np.uint64:
    """A well-mixed 64-bit state for any seed, so that neighbouring seeds give unrelated streams."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0]


def uniforms(states: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for uint64 states and int64 counters, both [n]: splitmix64's output at that counter.

    52 bits, so that `u * total` is always below `total` in float64.
    """
    mixed = _mix(states + (counters.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Plan:
    """Per-row settings of one batch, on the model's device; None where no row asks for it."""

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    all_greedy: bool
    head_k: int
    """Largest head any row asks for; 0: none."""
    ranks: bool
    masks: bool


def make_plan(wishes: list[Wish], vocab_size: int, device: torch.device) -> Plan:
    """The sampler's settings for a batch; a remembered one when all rows want the same, as they mostly do."""
    if wishes.count(wishes[0]) == len(wishes):
        return _uniform_plan(wishes[0], len(wishes), vocab_size, device)
    return _plan(wishes, vocab_size, device)


@lru_cache(REMEMBERED_PLANS)
def _uniform_plan(wish: Wish, count: int, vocab_size: int, device: torch.device) -> Plan:
    return _plan([wish] * count, vocab_size, device)


def _plan(wishes: list[Wish], vocab_size: int, device: torch.device) -> Plan:
    greedy = [w.temperature == 0 for w in wishes]

    def column(values: Sequence[float], neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
        return None if all(v == neutral for v in values) else torch.tensor(values, dtype=dtype, device=device)

    return Plan(
        temperature=column([w.temperature or 1.0 for w in wishes], 1.0, torch.float32),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        top_k=column(
            [min(w.top_k, vocab_size) if w.top_k > 0 else vocab_size for w in wishes], vocab_size, torch.int64
        ),
        top_p=column([NO_TOP_P if w.top_p >= 1 else w.top_p for w in wishes], NO_TOP_P, torch.float32),
        min_p=column([w.min_p for w in wishes], 0.0, torch.float32),
        all_greedy=all(greedy),
        head_k=max(w.head_k for w in wishes),
        ranks=any(w.ranks for w in wishes),
        masks=any(w.mask for w in wishes),
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids, logprobs (of the drawn ids), ranks [n]; kept [n, vocab]; head_ids, head_logprobs [n, head_k]."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor | None
    kept: torch.Tensor | None
    head_ids: torch.Tensor | None
    head_logprobs: torch.Tensor | None


def sample(logits: torch.Tensor, plan: Plan, uniform: torch.Tensor) -> Sampled:
    """Draw one token per row of `logits` [n, vocab]. `uniform` float64 [n]."""
    logits = process(logits.float(), plan)
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = _draw(logprobs, plan, uniform)
    drawn = logprobs.gather(1, ids)
    ranks = (logprobs >= drawn).sum(-1) if plan.ranks else None
    head_ids = head_logprobs = None
    if plan.head_k == 1:
        head_logprobs, head_ids = logprobs.max(-1, keepdim=True)
    elif plan.head_k:
        head_logprobs, head_ids = logprobs.topk(plan.head_k, dim=-1)
    kept = logits > -torch.inf if plan.masks else None
    return Sampled(ids[:, 0], drawn[:, 0], ranks, kept, head_ids, head_logprobs)


def process(logits: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Logits after temperature and truncation, minus infinity outside the kept set."""
    if plan.temperature is not None:
        logits = logits / plan.temperature[:, None]
    if plan.min_p is not None:
        floor = logits.amax(-1, keepdim=True) + plan.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if plan.top_k is not None or plan.top_p is not None:
        logits = _truncate(logits, plan)
    return logits


def _truncate(logits: torch.Tensor, plan: Plan) -> torch.Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if plan.top_k is not None:  # ties with the k-th value stay, as in vLLM
        kth = ordered.gather(1, plan.top_k[:, None] - 1)
        logits = logits.masked_fill(logits < kth, -torch.inf)
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    if plan.top_p is not None:
        share = torch.softmax(ordered, dim=-1)
        before = share.cumsum(-1) - share
        dropped = before >= plan.top_p[:, None]
        dropped[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
    return logits


def _draw(logprobs: torch.Tensor, plan: Plan, uniform: torch.Tensor) -> torch.Tensor:
    if plan.all_greedy:
        return logprobs.argmax(-1, keepdim=True)
    mass = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # First id whose cumulated mass is above the target: never one of zero mass.
    ids = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)
    if plan.greedy is not None:
        ids = torch.where(plan.greedy[:, None], logprobs.argmax(-1, keepdim=True), ids)
    return ids
