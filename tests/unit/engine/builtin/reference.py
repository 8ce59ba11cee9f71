"""What the engine must agree with, computed another way: plain forwards of an independently loaded model, and
the sampler's rules in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moorage.engine.builtin.model import load_runner
from moorage.engine.builtin.request import Request, SamplingParams
from moorage.engine.builtin.scheduler import Limits, Scheduler

CLOSE = 1e-4
GAP = 1e-5

TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
FAMILIES: dict[str, dict] = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 7},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
MOE = ("qwen3_moe", "mixtral", "olmoe")


def make_folder(folder: Path, family: str, seed: int = 0, **overrides: object) -> Path:
    """A random tiny model of a transformers family, with weights large enough to have opinions."""
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def make_scheduler(folder: Path, *, slots: int = 16, length: int = 128, routing: bool = False) -> Scheduler:
    runner = load_runner(str(folder), device="cpu", dtype="float32", routed_experts=routing)
    return Scheduler(runner, Limits(slots, length))


def make_request(
    name: str, prompt: list[int] | np.ndarray, params: SamplingParams, *, seed: int = 0, **more: object
) -> Request:
    tokens = np.asarray(prompt, dtype=np.int64)
    fields: dict = {
        "stop_ids": frozenset(params.stop_token_ids),
        "eos_id": None,
        "limit": params.max_tokens or 8,
        "want_mask": params.truncated,
        "head_k": params.logprobs or 0,
        "seed": seed if params.seed is None else params.seed,
    }
    return Request(id=name, prompt=tokens, params=params, **{**fields, **more})


def run_all(scheduler: Scheduler, requests: list[Request], per_step: int | None = None) -> None:
    """Drive until all requests ended; `per_step`: how many arrive before each step."""
    waiting = requests[::-1]
    while waiting or not scheduler.idle:
        for _ in range(min(len(waiting), per_step or len(waiting))):
            scheduler.add(waiting.pop())
        scheduler.step()


@dataclass(frozen=True)
class Truth:
    """Processed log-probabilities [tokens, vocab], -inf outside the kept set, float64; and the gap by which
    the set was decided, [tokens]."""

    logprobs: np.ndarray
    decided_by: np.ndarray


class Reference:
    """An independently loaded model."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [tokens, vocab] of one plain forward."""
        ids = torch.from_numpy(tokens)[None]
        return self.model(input_ids=ids, use_cache=False).logits[0].double().numpy()

    @torch.inference_mode()
    def choices(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Experts [tokens, layers, k] and the gap [tokens, layers] between the last chosen and the first
        not."""
        ids = torch.from_numpy(tokens)[None]
        out = self.model(input_ids=ids, use_cache=False, output_router_logits=True)
        k = self.model.config.num_experts_per_tok
        shares = torch.stack([logits.float().softmax(-1) for logits in out.router_logits], dim=1)
        values, indices = shares.topk(k + 1, dim=-1)
        gaps = (values[..., :-1] - values[..., 1:]).amin(-1)
        return indices[..., :k].numpy(), gaps.numpy()

    def truth(self, request: Request) -> Truth:
        known = np.concatenate([request.prompt, np.asarray(request.out, dtype=np.int64)])
        logits = self.logits(known)[len(request.prompt) - 1 : -1]
        return process(logits, request.params)


def process(logits: np.ndarray, params: SamplingParams) -> Truth:
    """The rules of vLLM's sampler, one row at a time, in float64."""
    rows, gaps = [], []
    for row in logits:
        gap = np.inf
        if not params.greedy:
            row = row / params.temperature
            if params.min_p > 0:
                floor = row.max() + np.log(params.min_p)
                gap = min(gap, np.abs(row - floor).min())
                row = np.where(row < floor, -np.inf, row)
            if 0 < params.top_k < len(row):
                ordered = np.sort(row)[::-1]
                kth = ordered[params.top_k - 1]
                if np.isfinite(kth):
                    gap = min(gap, kth - ordered[params.top_k])
                row = np.where(row < kth, -np.inf, row)
            if params.top_p < 1:
                order = np.argsort(-row, kind="stable")
                share = softmax(row)[order]
                before = np.cumsum(share) - share
                gap = min(gap, np.abs(before - params.top_p).min())
                keep = np.zeros(len(row), dtype=bool)
                keep[order] = before < params.top_p
                keep[order[0]] = True
                row = np.where(keep, row, -np.inf)
        rows.append(row - row.max() - np.log(np.exp(row - row.max()).sum()))
        gaps.append(gap)
    return Truth(np.array(rows), np.array(gaps))


def softmax(row: np.ndarray) -> np.ndarray:
    grown = np.exp(row - row.max())
    return grown / grown.sum()


def assert_exact(reference: Reference, request: Request) -> None:
    """Log-probabilities, kept sets, ranks and heads of a finished request equal the reference's."""
    truth = reference.truth(request)
    for at, token in enumerate(request.out):
        values = truth.logprobs[at]
        decided = truth.decided_by[at] > GAP
        if not decided:
            continue
        assert np.isfinite(values[token]), "a token outside the kept set was drawn"
        assert abs(request.logprobs[at] - values[token]) < CLOSE
        if request.params.greedy:
            assert values.max() - values[token] < GAP
        if request.want_mask:
            assert token in request.masks[at]
            np.testing.assert_array_equal(request.masks[at], np.flatnonzero(np.isfinite(values)))
        if request.params.logprobs is not None:
            assert abs(request.ranks[at] - (values >= values[token]).sum()) <= _near(values, values[token])
        if request.params.logprobs:
            _assert_head(request, at, values)


def _near(values: np.ndarray, value: float) -> int:
    return int((np.abs(values - value) < GAP).sum()) - 1


def _assert_head(request: Request, at: int, values: np.ndarray) -> None:
    k = request.params.logprobs or 0
    ids, logprobs = request.head_ids[at], request.head_logprobs[at]
    assert ids.shape == logprobs.shape == (k,)
    expected = np.sort(values)[::-1][:k]
    real = np.isfinite(expected)
    assert (np.isfinite(logprobs) == real).all()
    np.testing.assert_allclose(logprobs[real], expected[real], atol=CLOSE, rtol=0)
    np.testing.assert_allclose(values[ids[real]], expected[real], atol=CLOSE, rtol=0)
    assert len(set(ids.tolist())) == k


def assert_routing(reference: Reference, request: Request) -> None:
    """Routing rows of a finished request equal the reference model's own choices, in order."""
    fed = np.concatenate([request.prompt, np.asarray(request.out[:-1], dtype=np.int64)])
    start = request.params.routed_experts_prompt_start
    chosen, gaps = reference.choices(fed)
    rows = request.routed_experts
    assert rows is not None
    assert rows.dtype == np.uint8
    assert rows.shape == chosen[start:].shape
    sure = gaps[start:] > GAP
    assert (~sure).sum() <= max(2, 0.01 * sure.size)
    np.testing.assert_array_equal(rows[sure], chosen[start:][sure])
