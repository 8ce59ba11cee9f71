from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.records.packing import SequenceCost, cut_sample, pack, sequence_cost
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, Span, TrainSample, owned_slices

ROUTINGS = (None, (2, 2), (4, 2))


def make_sample(index: int, num_tokens: int, routing: tuple[int, int] | None = None) -> TrainSample:
    payload = PayloadSlice(
        "http://x", "s.n", f"id{index}", num_tokens, num_tokens, ("token_ids",), routing, 8
    )
    half = max(1, num_tokens // 2)
    spans = (Span(0, half, 0.5), Span(half, num_tokens, None)) if num_tokens > half else (Span(0, half, 0.5),)
    return TrainSample(payload, spans, "env", trace_id=f"t{index}")


def flatten(ranks: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [batch for rank in ranks for batch in rank]


SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from(ROUTINGS)), max_size=40).map(
    lambda items: [make_sample(i, n, routing) for i, (n, routing) in enumerate(items)]
)


@settings(max_examples=200, deadline=None)
@given(samples=SAMPLES, seq_len=st.integers(1, 48), num_ranks=st.integers(1, 5))
def test_every_sample_is_in_exactly_one_owning_micro_batch(samples, seq_len, num_ranks):
    ranks = pack(samples, seq_len, num_ranks)
    owned = [sample for batch in flatten(ranks) if not batch.dummy for sample in batch.samples]
    expected = [cut_sample(sample, seq_len) for sample in samples]
    assert sorted(s.trace_id for s in owned) == sorted(s.trace_id for s in expected)
    assert {s.trace_id: s for s in owned} == {s.trace_id: s for s in expected}


@settings(max_examples=200, deadline=None)
@given(samples=SAMPLES, seq_len=st.integers(1, 48), num_ranks=st.integers(1, 5))
def test_micro_batches_fit_and_agree_on_routing_and_ranks_on_their_number(samples, seq_len, num_ranks):
    ranks = pack(samples, seq_len, num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    for batch in flatten(ranks):
        assert 1 <= batch.num_tokens <= seq_len
        assert len({sample.payload.routing for sample in batch.samples}) == 1
    if samples:
        assert all(rank for rank in ranks)


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, num_ranks=st.integers(1, 5))
def test_dummies_are_few_come_last_and_repeat_references_that_another_owns(samples, num_ranks):
    ranks = pack(samples, 48, num_ranks)
    owned = {payload.id for payload in owned_slices(flatten(ranks))}
    dummies = [batch for batch in flatten(ranks) if batch.dummy]
    assert len(dummies) < num_ranks
    assert all(sample.payload.id in owned for batch in dummies for sample in batch.samples)
    for rank in ranks:
        flags = [batch.dummy for batch in rank]
        assert flags == sorted(flags)


@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES, num_ranks=st.integers(1, 4))
def test_packing_is_a_function_of_its_arguments(samples, num_ranks):
    assert pack(samples, 48, num_ranks) == pack(list(samples), 48, num_ranks)


def test_no_samples_give_every_rank_an_empty_list():
    assert pack([], 16, 3) == [[], [], []]


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        pack([make_sample(0, 0)], 16)


def test_bins_are_split_before_dummies_are_made():
    ranks = pack([make_sample(i, 4) for i in range(8)], 64, num_ranks=4)
    assert [len(rank) for rank in ranks] == [1, 1, 1, 1]
    assert not any(batch.dummy for batch in flatten(ranks))
    assert [rank[0].num_tokens for rank in ranks] == [8, 8, 8, 8]


def test_one_sample_on_three_ranks_needs_two_dummies():
    batches = flatten(pack([make_sample(0, 4)], 64, num_ranks=3))
    assert sorted(batch.dummy for batch in batches) == [False, True, True]


def test_ranks_are_balanced_by_cost_not_by_count():
    samples = [make_sample(i, n) for i, n in enumerate([60, 60, 31, 31, 31, 31, 31, 31])]
    cost = SequenceCost(0.0, 1.0)
    ranks = pack(samples, 64, 2, cost)
    loads = [sum(cost(s.num_tokens) for b in rank for s in b.samples) for rank in ranks]
    assert max(loads) / min(loads) < 1.5


def test_a_cut_clips_spans_and_drops_empty_ones():
    cut = cut_sample(make_sample(0, 20), 8)
    assert (cut.num_tokens, cut.payload.total_tokens) == (8, 20)
    assert cut.spans == (Span(0, 8, 0.5),)


def test_packing_efficiency_is_that_of_first_fit_decreasing():
    samples = [make_sample(i, n) for i, n in enumerate([33, 31, 30, 20, 10, 4])]
    batches = flatten(pack(samples, 64))
    assert sorted(batch.num_tokens for batch in batches) == [64, 64]


def test_sequence_cost_knows_experts_and_falls_back_to_tokens():
    assert sequence_cost({}) == SequenceCost()
    dense = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    attention, mlp, head = 8 * 8 * 4, 3 * 8 * 16, 8 * 10
    assert sequence_cost(dense) == SequenceCost(6.0 * (2 * (attention + mlp) + head), 6.0 * 2 * 8)
    sparse = {**dense, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    assert sequence_cost(sparse).linear == 6.0 * (2 * (attention + 3 * 8 * 4 * 2) + head)
