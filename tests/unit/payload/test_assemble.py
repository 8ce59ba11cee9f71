"""Assembly: what training sees is byte for byte what was encoded, cut, in packing order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.core.errors import PayloadError
from moorage.payload.assemble import PAD_TOKEN, assemble, placeholder
from moorage.payload.codec import BranchArrays, cut
from moorage.records.sample import MicroBatch, Span, TrainSample
from tests.unit.payload.builders import OPTIONAL, make_arrays, make_slice


def make_sample(arrays: BranchArrays, blob_id: str, num_tokens: int, spans=(), temperature: float = 1.0):
    piece = make_slice(arrays, blob_id, num_tokens=num_tokens)
    return TrainSample(piece, tuple(spans), "env", temperature)


@st.composite
def packed(draw):
    """A micro batch with its payloads: routing for all or none, the rest mixed, cut anywhere."""
    routed = draw(st.booleans())
    payloads, samples = {}, []
    for index in range(draw(st.integers(1, 4))):
        optional = set(draw(st.sets(st.sampled_from([o for o in OPTIONAL if o != "routed_experts"]))))
        if routed:
            optional.add("routed_experts")
        arrays = make_arrays(
            draw(st.integers(1, 20)),
            seed=draw(st.integers(0, 2**32 - 1)),
            optional=tuple(optional),
            head_k=draw(st.integers(1, 4)),
        )
        kept = draw(st.integers(1, arrays.num_tokens))
        payloads[f"b{index}"] = arrays
        samples.append(make_sample(arrays, f"b{index}", kept, [Span(0, kept, 0.5)], index + 0.5))
    return MicroBatch(tuple(samples)), payloads


@given(packed(), st.integers(1, 8))
def test_every_field_is_the_cut_arrays_joined_in_packing_order(batch, pad_multiple) -> None:
    micro, payloads = batch
    parts = [cut(payloads[s.payload.id], s.num_tokens) for s in micro.samples]
    made = assemble(micro, payloads, pad_multiple=pad_multiple)
    n = sum(part.num_tokens for part in parts)
    assert made.num_tokens % pad_multiple == 0
    assert made.num_tokens - n < pad_multiple
    assert made.token_ids[:n].tobytes() == b"".join(part.token_ids.tobytes() for part in parts)
    assert made.logprobs[:n].tobytes() == b"".join(part.logprobs.tobytes() for part in parts)
    assert made.loss_mask[:n].tobytes() == b"".join(part.loss_mask.tobytes() for part in parts)
    if micro.routing:
        assert made.routed_experts is not None
        assert made.routed_experts[:n].tobytes() == b"".join(p.routed_experts.tobytes() for p in parts)
        assert len(made.routed_experts) == made.num_tokens
    else:
        assert made.routed_experts is None
    at = 0
    for index, (sample, part) in enumerate(zip(micro.samples, parts, strict=True)):
        rows = slice(at, at + part.num_tokens)
        assert made.positions[rows].tolist() == list(range(part.num_tokens))
        assert (made.temperatures[rows] == sample.temperature).all()
        assert made.seq_lens[index] == part.num_tokens + (
            made.num_tokens - n if index == len(parts) - 1 else 0
        )
        at += part.num_tokens
    assert (made.token_ids[n:] == PAD_TOKEN).all()
    assert not made.loss_mask[n:].any()
    assert not made.rl_weights[n:].any()
    for array in (made.positions, made.logprobs, made.advantages, made.ce_weights, made.ref_kl_weights):
        assert len(array) == made.num_tokens


@given(packed())
def test_ragged_fields_line_up_with_their_tokens(batch) -> None:
    micro, payloads = batch
    parts = [cut(payloads[s.payload.id], s.num_tokens) for s in micro.samples]
    made = assemble(micro, payloads)
    if made.sampling is not None:
        counts, ids = made.sampling
        assert counts.sum() == len(ids)
        assert ids.tobytes() == b"".join(
            p.sampling_ids.tobytes() for p in parts if p.sampling_ids is not None
        )
    else:
        assert all(part.sampling_ids is None for part in parts)
    if made.head is None:
        assert all(part.head_ids is None for part in parts)
        return
    ids, logprobs = made.head
    assert len(ids) == len(logprobs) == made.loss_mask.sum()
    at = 0
    for part in parts:
        rows = slice(at, at + part.num_trainable)
        width = 0 if part.head_ids is None else part.head_ids.shape[1]
        if part.head_ids is not None and part.head_logprobs is not None:
            assert ids[rows, :width].tobytes() == part.head_ids.tobytes()
            assert logprobs[rows, :width].tobytes() == part.head_logprobs.tobytes()
        assert (ids[rows, width:] == -1).all()
        assert np.isneginf(logprobs[rows, width:]).all()
        at += part.num_trainable


def test_credit_lies_on_trained_tokens_of_its_span_only() -> None:
    arrays = make_arrays(10, optional=(), prompt=4)
    spans = [Span(0, 4, None, rl=0.0, ce=0.3), Span(4, 6, -2.0, rl=0.5, ref_kl=0.1), Span(8, 9, 0.0)]
    made = assemble(MicroBatch((make_sample(arrays, "b", 9, spans),)), {"b": arrays})
    assert made.advantages.tolist() == [0, 0, 0, 0, -2, -2, 0, 0, 0]
    assert made.rl_weights.tolist() == [0, 0, 0, 0, 0.5, 0.5, 0, 0, 1]
    assert made.ce_weights.tolist() == pytest.approx([0.3] * 4 + [0] * 5)
    assert made.ref_kl_weights.tolist() == pytest.approx([0] * 4 + [0.1] * 2 + [0] * 3)


def test_credit_that_is_not_assigned_or_out_of_range_is_refused() -> None:
    arrays = make_arrays(10, optional=(), prompt=4)
    for span, named in ((Span(4, 6, None), "no advantage"), (Span(4, 10, 1.0), "outside the 9 tokens")):
        with pytest.raises(PayloadError, match=named):
            assemble(MicroBatch((make_sample(arrays, "b", 9, [span]),)), {"b": arrays})
    prompt_only = MicroBatch((make_sample(arrays, "b", 9, [Span(0, 4, None, ce=1.0)]),))
    assert assemble(prompt_only, {"b": arrays}).ce_weights.sum() == 4


def test_a_missing_or_failed_payload_is_never_replaced_by_zeros() -> None:
    arrays = make_arrays(10, optional=())
    micro = MicroBatch((make_sample(arrays, "b", 9),))
    with pytest.raises(PayloadError, match="was not fetched"):
        assemble(micro, {})
    with pytest.raises(PayloadError, match="gone"):
        assemble(micro, {"b": PayloadError("gone")})
    with pytest.raises(PayloadError, match="without samples"):
        assemble(MicroBatch(()), {})
    with pytest.raises(PayloadError, match="cannot keep 9 of 5"):
        assemble(micro, {"b": make_arrays(5, optional=())})


def test_samples_with_and_without_routing_do_not_share_a_micro_batch() -> None:
    routed, bare = make_arrays(5, optional=("routed_experts",)), make_arrays(5, optional=())
    micro = MicroBatch((make_sample(routed, "r", 5), make_sample(bare, "b", 5)))
    with pytest.raises(PayloadError, match="share a micro batch"):
        assemble(micro, {"r": routed, "b": bare})


def test_narrow_and_wide_expert_ids_join() -> None:
    narrow, wide = make_arrays(5, seed=1), make_arrays(5, seed=2, wide=True)
    micro = MicroBatch((make_sample(narrow, "n", 5), make_sample(wide, "w", 5)))
    rows = assemble(micro, {"n": narrow, "w": wide}).routed_experts
    assert rows is not None
    assert rows.dtype == np.uint16
    assert (rows[:5] == narrow.routed_experts).all()
    assert (rows[5:] == wide.routed_experts).all()


def test_a_lost_micro_batch_keeps_its_shape_and_repeats_real_rows() -> None:
    arrived, lost = make_arrays(6, seed=1), make_arrays(9, seed=2)
    micro = MicroBatch((make_sample(arrived, "a", 6), make_sample(lost, "l", 7, [Span(0, 7, 1.0)])))
    held = {"a": arrived, "l": PayloadError("gone")}
    whole = assemble(micro, {"a": arrived, "l": lost}, pad_multiple=4)
    made = placeholder(micro, held, pad_multiple=4)
    assert made.dropped
    assert made.seq_lens.tolist() == whole.seq_lens.tolist()
    assert made.positions.tolist() == whole.positions.tolist()
    assert not made.loss_mask.any()
    for weights in (made.rl_weights, made.ce_weights, made.ref_kl_weights, made.advantages):
        assert not weights.any()
    assert whole.routed_experts is not None
    assert made.routed_experts is not None
    assert made.routed_experts.shape == whole.routed_experts.shape
    real = {row.tobytes() for row in arrived.routed_experts}
    assert all(row.tobytes() in real for row in made.routed_experts)


def test_without_any_arrived_row_a_donor_or_distinct_experts_stand_in() -> None:
    lost = make_arrays(5, routing=(2, 3))
    micro = MicroBatch((make_sample(lost, "l", 5),))
    donor = make_arrays(3, seed=9, routing=(2, 3)).routed_experts
    made = placeholder(micro, donor=donor)
    assert made.routed_experts is not None
    assert made.routed_experts[3:5].tobytes() == donor[:2].tobytes()
    made = placeholder(micro)
    assert made.routed_experts is not None
    assert (made.routed_experts == np.arange(3)).all()
    bare = MicroBatch((make_sample(make_arrays(5, optional=()), "b", 5),))
    assert placeholder(bare).routed_experts is None


def test_a_dummy_trains_on_nothing_and_is_no_drop() -> None:
    arrays = make_arrays(8)
    micro = MicroBatch((make_sample(arrays, "b", 8, [Span(0, 8, 1.0, ce=1.0)]),), dummy=True)
    made = assemble(micro, {"b": arrays})
    assert not made.loss_mask.any()
    for weights in (made.rl_weights, made.ce_weights, made.advantages):
        assert not weights.any()
    assert (made.head, made.sampling, made.dropped) == (None, None, False)
    assert made.routed_experts is not None
    assert made.routed_experts.tobytes() == arrays.routed_experts.tobytes()
    assert not placeholder(micro).dropped
