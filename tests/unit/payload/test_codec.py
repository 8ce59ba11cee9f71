"""Blobs: byte-identical round trip, one cut for all fields, and nothing accepted that is not a whole blob."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from moorage.core.errors import PayloadError
from moorage.payload.codec import cut, decode, encode, header_nbytes, nbytes_of, read_layout
from tests.unit.payload.builders import assert_same, branches, join, make_arrays


@given(branches())
def test_decode_gives_back_what_was_encoded(arrays) -> None:
    assert_same(decode(join(encode(arrays))), arrays)


@given(branches())
def test_any_safetensors_reader_opens_a_blob(arrays) -> None:
    loaded = safetensors.numpy.load(join(encode(arrays)))
    assert set(loaded) == set(arrays.present())
    for name, array in arrays.present().items():
        assert np.array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


@given(branches())
def test_encode_and_decode_copy_nothing(arrays) -> None:
    buffers = encode(arrays)
    for array in arrays.present().values():
        if array.nbytes:
            assert any(np.shares_memory(array, np.frombuffer(b, np.uint8)) for b in buffers[1:])
    blob = np.frombuffer(join(buffers), np.uint8)
    for array in decode(blob.data).present().values():
        assert array.nbytes == 0 or np.shares_memory(array, blob)
        assert array.flags.aligned


@given(branches(), st.data())
def test_a_cut_has_the_same_length_in_every_field(arrays, data) -> None:
    n = data.draw(st.integers(0, arrays.num_tokens))
    kept = cut(arrays, n)
    rows = {name: len(array) for name, array in kept.present().items()}
    trained = int(arrays.loss_mask[:n].sum())
    for name in ("token_ids", "loss_mask", "logprobs", "content_mask", "routed_experts", "sampling_counts"):
        assert rows.get(name, n) == n
    assert rows.get("head_ids", trained) == rows.get("head_logprobs", trained) == trained
    if arrays.sampling_counts is not None:
        assert rows["sampling_ids"] == int(arrays.sampling_counts[:n].sum())
    for name, array in kept.present().items():
        assert array.tobytes() == arrays.present()[name][: len(array)].tobytes()


def test_a_branch_can_be_cut_at_every_position_and_the_cut_encodes() -> None:
    arrays = make_arrays(30, seed=3)
    for n in range(31):
        assert_same(decode(join(encode(cut(arrays, n)))), cut(arrays, n))


@given(branches(max_tokens=20), st.data())
def test_a_blob_cut_short_anywhere_is_refused(arrays, data) -> None:
    blob = join(encode(arrays))
    short = blob[: data.draw(st.integers(0, len(blob) - 1))]
    with pytest.raises(PayloadError):
        decode(short)
    with pytest.raises(PayloadError):
        decode(blob + b"x")


@given(st.binary(max_size=200))
def test_noise_is_refused(noise) -> None:
    with pytest.raises(PayloadError):
        decode(noise)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": np.zeros(10, np.int64)}, "token_ids has dtype int64"),
        ({"logprobs": np.zeros(9, np.float32)}, "logprobs has shape"),
        ({"routed_experts": np.zeros((10, 3), np.uint8)}, "routed_experts has shape"),
        ({"routed_experts": np.zeros((10, 3, 2), np.int32)}, "routed_experts has dtype int32"),
        ({"loss_mask": np.full(10, 2, np.uint8)}, "loss_mask holds 2"),
        ({"sampling_ids": None}, "sampling_counts and sampling_ids"),
        ({"sampling_ids": np.zeros(1, np.int32)}, "sampling_counts add to"),
        ({"head_logprobs": None}, "head_ids and head_logprobs"),
        (
            {"head_ids": np.zeros((9, 4), np.int32), "head_logprobs": np.zeros((9, 4), np.float32)},
            "head_ids has 9",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(change, named) -> None:
    with pytest.raises(PayloadError, match=named):
        encode(replace(make_arrays(10, prompt=3), **change))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"I32"', b'"F32"'),
        (b'"token_ids"', b'"tokEn_ids"'),
        (b'"shape":[10]', b'"shape":[11]'),
        (b'"data_offsets":[0,40]', b'"data_offsets":[4,44]'),
    ],
)
def test_a_header_that_lies_is_refused(old, new) -> None:
    blob = join(encode(make_arrays(10)))
    assert old in blob
    with pytest.raises(PayloadError):
        decode(blob.replace(old, new, 1))


def test_layout_and_size_come_from_the_head_alone() -> None:
    arrays = make_arrays(25)
    buffers = encode(arrays)
    blob = join(buffers)
    layout = read_layout(blob[: header_nbytes(blob)])
    assert nbytes_of(buffers) == len(blob)
    for name, array in arrays.present().items():
        field = layout[name]
        assert blob[field.offset : field.offset + field.nbytes] == array.tobytes()


def test_negative_counts_are_refused_even_when_they_add_up() -> None:
    arrays = make_arrays(4, optional=(), prompt=2)
    bad = replace(
        arrays,
        sampling_counts=np.array([3, -1, 0, 0], np.int32),
        sampling_ids=np.zeros(2, np.int32),
    )
    with pytest.raises(PayloadError, match="negative"):
        encode(bad)


def test_arrays_that_are_not_contiguous_are_encoded_all_the_same() -> None:
    arrays = make_arrays(12)
    assert arrays.routed_experts is not None
    strided = replace(arrays, routed_experts=np.asfortranarray(arrays.routed_experts))
    assert_same(decode(join(encode(strided))), arrays)
