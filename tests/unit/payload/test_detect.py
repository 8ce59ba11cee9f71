"""Detectors fire where the definitions say, at the edges too."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.payload.detect import gibberish, repetition


def test_gibberish_wants_a_rare_token_below_the_uniform_probability() -> None:
    limit = -math.log(150_000) - 2.0
    ids = np.array([5, 100_001], np.int32)
    sampled = np.array([1, 1], np.uint8)

    def fires(logprob: float, token: int = 100_001, mask: int = 1) -> bool:
        return gibberish(
            np.array([5, token], np.int32),
            np.array([1, mask], np.uint8),
            np.array([-0.1, logprob], np.float32),
            vocab_size=150_000,
        )

    assert fires(limit - 0.01)
    assert not fires(limit + 0.01)
    assert not fires(limit - 0.01, token=100_000)
    assert not fires(limit - 0.01, mask=0)
    assert not gibberish(ids, sampled, np.zeros(2, np.float32), vocab_size=150_000)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(1, 8))
def test_repetition_equals_the_plain_loop(tokens, window) -> None:
    sampled = np.array([s for s, _ in tokens], np.uint8)
    logprobs = np.array([math.log(0.999) if sure else -1.0 for _, sure in tokens], np.float32)
    streak, expected = 0, False
    for is_sampled, sure in tokens:
        if is_sampled:
            streak = streak + 1 if sure else 0
            expected = expected or streak >= window
    assert repetition(sampled, logprobs, window=window) is expected


def test_the_threshold_is_strict_and_the_window_positive() -> None:
    ones = np.ones(3, np.uint8)
    assert not repetition(ones, np.full(3, math.log(0.99)), window=3)
    with pytest.raises(ValueError, match="window"):
        repetition(ones, np.zeros(3), window=0)
