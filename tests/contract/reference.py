"""What an engine's numbers must equal: a plain forward of the same weights, one sequence at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def load(folder: Path) -> Any:
    """The model in `folder`, float32, ready to be asked."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sampled_logits(folder: Path, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Logits [S, vocabulary] from which each completion token was drawn, float64."""
    import torch

    with torch.no_grad():
        logits = load(folder)(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


def processed_logprobs(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Log-probabilities of the distribution that sampling draws from: -inf outside the kept set.

    Temperature first, then min_p, top_k and top_p; greedy sampling (temperature 0) leaves the logits alone.
    """
    if temperature == 0:
        return _log_softmax(logits)
    scaled = logits / temperature
    if min_p:
        probabilities = np.exp(_log_softmax(scaled))
        scaled = np.where(probabilities < min_p * probabilities.max(-1, keepdims=True), -np.inf, scaled)
    if top_k:
        scaled = np.where(scaled < np.sort(scaled, -1)[:, -top_k, None], -np.inf, scaled)
    if top_p < 1:
        scaled = _nucleus(scaled, top_p)
    return _log_softmax(scaled)


def _nucleus(scaled: np.ndarray, top_p: float) -> np.ndarray:
    """Keep the likeliest tokens up to and including the one that reaches `top_p`."""
    order = np.argsort(-scaled, -1, kind="stable")
    mass = np.cumsum(np.take_along_axis(np.exp(_log_softmax(scaled)), order, -1), -1)
    before = np.concatenate([np.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    kept = np.zeros_like(scaled, dtype=bool)
    np.put_along_axis(kept, order, before < top_p, -1)
    return np.where(kept, scaled, -np.inf)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
