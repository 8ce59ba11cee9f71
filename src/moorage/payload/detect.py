"""Degeneracy detectors: measured in the env server, where the arrays are (R19). Pure.

Every detector measures every trainable branch; what is done about a finding is decided elsewhere. Inputs are
the aligned streams of one branch: a token counts as sampled where `loss_mask` (or any mask of sampled tokens)
is non-zero.
"""

from __future__ import annotations

import math

import numpy as np

TOKEN_ID_THRESHOLD = 100_000
LOGPROB_OFFSET = 2.0
REPETITION_WINDOW = 3000
PROB_THRESHOLD = 0.99


def gibberish(
    token_ids: np.ndarray,
    sampled: np.ndarray,
    logprobs: np.ndarray,
    *,
    vocab_size: int,
    token_id_threshold: int = TOKEN_ID_THRESHOLD,
    logprob_offset: float = LOGPROB_OFFSET,
) -> bool:
    """Whether a rare token (id above the threshold) was sampled at a log-probability below uniform by the
    offset: `logprob < -log(vocab_size) - logprob_offset` (arXiv 2510.02387, section 5.2)."""
    limit = -math.log(vocab_size) - logprob_offset
    rare = (sampled != 0) & (token_ids > token_id_threshold) & (logprobs < limit)
    return bool(rare.any())


def repetition(
    sampled: np.ndarray,
    logprobs: np.ndarray,
    *,
    window: int = REPETITION_WINDOW,
    prob_threshold: float = PROB_THRESHOLD,
) -> bool:
    """Whether `window` sampled tokens in a row had a probability above the threshold (arXiv 2506.13585,
    section 3.2). Tokens that were not sampled are skipped and do not break the row."""
    if window < 1:
        raise ValueError(f"window is {window}, expected at least 1")
    sure = logprobs[sampled != 0] > math.log(prob_threshold)
    if len(sure) < window:
        return False
    breaks = np.flatnonzero(~sure)
    edges = np.concatenate(([-1], breaks, [len(sure)]))
    return bool((np.diff(edges) - 1).max() >= window)
