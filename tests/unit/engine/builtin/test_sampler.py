"""Truncation and drawing against a float64 reference, and the uniform numbers themselves."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.engine.builtin.request import SamplingParams
from moorage.engine.builtin.sampler import hash_seed, make_plan, process, sample, uniforms
from tests.unit.engine.builtin import reference as ref

VOCAB = 40


def plan_of(*params: SamplingParams):
    requests = [ref.make_request(str(i), [1], p) for i, p in enumerate(params)]
    return make_plan([request.wish for request in requests], VOCAB, torch.device("cpu"))


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(params, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_the_kept_set_and_its_logprobs_are_those_of_the_reference(
    batch: list[SamplingParams], seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(batch), VOCAB))).float()
    processed = process(logits, plan_of(*batch))
    logprobs = torch.log_softmax(processed, -1).numpy()
    for row, p in enumerate(batch):
        truth = ref.process(logits[row : row + 1].double().numpy(), p)
        if truth.decided_by[0] < ref.GAP:
            continue
        np.testing.assert_array_equal(np.isfinite(logprobs[row]), np.isfinite(truth.logprobs[0]))
        kept = np.isfinite(logprobs[row])
        np.testing.assert_allclose(logprobs[row][kept], truth.logprobs[0][kept], atol=1e-5)


def test_a_batch_of_equal_wishes_is_planned_as_one_of_different_ones() -> None:
    p = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=3)
    alone, mixed = plan_of(p, p), plan_of(p, SamplingParams(temperature=0.0), p)
    assert plan_of(p, p) is alone
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert getattr(alone, name).tolist() == [getattr(mixed, name)[row].item() for row in (0, 2)]
    assert (alone.head_k, alone.ranks, alone.masks, alone.greedy) == (3, True, True, None)
    assert mixed.greedy is not None
    assert mixed.greedy.tolist() == [False, True, False]


def test_ties_with_the_last_kept_value_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0] + [-9.0] * (VOCAB - 5)])
    kept = process(logits, plan_of(SamplingParams(top_k=2))) > -torch.inf
    assert kept[0].nonzero().flatten().tolist() == [1, 2, 3]


def test_what_is_drawn_follows_the_distribution() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 1.5, VOCAB)).float().repeat(20_000, 1)
    p = SamplingParams(temperature=1.3, top_k=12)
    plan = make_plan([ref.make_request("a", [1], p).wish] * 20_000, VOCAB, torch.device("cpu"))
    state = np.full(20_000, hash_seed(7))
    u = torch.from_numpy(uniforms(state, np.arange(20_000)))
    drawn = sample(logits, plan, u)
    share = np.bincount(drawn.ids.numpy(), minlength=VOCAB) / 20_000
    expected = np.exp(ref.process(logits[:1].double().numpy(), p).logprobs[0])
    assert share[expected == 0].sum() == 0
    error = np.abs(share - expected) / np.sqrt(np.maximum(expected, 1e-9) / 20_000)
    assert error[expected > 0].max() < 4.5


def test_extreme_uniforms_draw_only_kept_tokens() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 3], logits[:, 17] = 0.3, 0.2
    plan = plan_of(SamplingParams(), SamplingParams())
    drawn = sample(logits, plan, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert drawn.ids.tolist() == [3, 17]


def test_uniforms_are_even_and_unrelated_between_seeds_and_counters() -> None:
    states = np.array([hash_seed(seed) for seed in range(400)])
    grid = np.stack([uniforms(states, np.full(400, counter)) for counter in range(200)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(grid.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


def test_a_greedy_row_is_neither_divided_nor_truncated() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (2, VOCAB))).float()
    batch = (SamplingParams(temperature=0, top_k=1, top_p=0.1), SamplingParams(temperature=0.5, top_k=2))
    drawn = sample(logits, plan_of(*batch), torch.tensor([0.99, 0.5], dtype=torch.float64))
    assert drawn.ids[0] == logits[0].argmax()
    assert torch.isclose(drawn.logprobs[0], logits[0].log_softmax(-1).max())
