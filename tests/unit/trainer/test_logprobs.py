"""Log-probabilities: the engine's order of operations, kept sets, nothing from rows that were not asked."""

from __future__ import annotations

import math

import pytest
import torch

from moorage.trainer.logprobs import KeptSets, token_logprobs


def test_the_logits_are_divided_by_the_temperature_before_the_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    logp, entropy = token_logprobs(logits, torch.tensor([1]), torch.tensor([2.0]))
    expected = (logits / 2).log_softmax(-1)
    assert float(logp) == pytest.approx(float(expected[0, 1]))
    assert float(entropy) == pytest.approx(-float((expected.exp() * expected).sum()))


def test_a_kept_set_renormalises_and_a_singleton_gives_exactly_zero() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    kept = KeptSets(torch.tensor([[1, 2], [1, -1], [-1, -1]]))
    logp, _ = token_logprobs(logits, torch.tensor([1, 1, 1]), torch.ones(3), kept)
    assert float(logp[0]) == pytest.approx(2.0 - math.log(math.exp(2) + math.exp(4)))
    assert float(logp[1]) == 0.0
    assert float(logp[2]) == pytest.approx(float(logits[2].log_softmax(-1)[1]))


def test_a_kept_set_without_the_label_is_not_used() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    logp, _ = token_logprobs(logits, torch.tensor([0]), torch.ones(1), KeptSets(torch.tensor([[1, 2]])))
    assert float(logp) == pytest.approx(float(logits.log_softmax(-1)[0, 0]))


def test_gradients_of_rows_without_a_kept_set_are_finite() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    kept = KeptSets(torch.tensor([[0, 1], [-1, -1], [2, -1]]))
    logp, _ = token_logprobs(logits, torch.tensor([0, 1, 2]), torch.ones(3), kept)
    logp.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[2], torch.zeros(5))  # a singleton has nothing to learn
    assert torch.equal(logits.grad[0, 2:], torch.zeros(3))  # tokens that were cut away get nothing


def test_ragged_kept_sets_follow_the_chosen_rows() -> None:
    counts = torch.tensor([2, 0, 1, 3])
    ids = torch.tensor([10, 11, 20, 30, 31, 32])
    kept = KeptSets.from_ragged(counts, ids, torch.tensor([1, 3, 2]))
    assert kept.ids.tolist() == [[-1, -1, -1], [30, 31, 32], [20, -1, -1]]
    assert KeptSets.from_ragged(counts, ids, torch.tensor([1])) is None


def test_infinite_logits_of_other_tokens_give_a_finite_entropy() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    logp, entropy = token_logprobs(logits, torch.tensor([2]), torch.ones(1))
    assert torch.isfinite(logp).all()
    assert torch.isfinite(entropy).all()
