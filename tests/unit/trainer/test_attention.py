"""Packed rows: sequences never see each other, whatever the model and the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.core.errors import ConfigError
from moorage.trainer.attention import make_layout, packed_as, packed_sdpa
from moorage.trainer.selfcheck import check_packing
from tests.unit.trainer.models import FAMILIES, alone, gradients, make_model

SEQUENCES = (9, 1, 14, 6)


def _ids(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 96, (n,), generator=generator) for n in lengths]


def _packed_logprobs(model, sequences: list[torch.Tensor]) -> torch.Tensor:
    layout = make_layout([len(s) for s in sequences])
    row = torch.cat(sequences)
    with model.row(layout):
        logits = model.logits(row, layout, torch.arange(len(row)))
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_packed_equals_unpacked_in_logprobs_and_gradients(family: str, order: str) -> None:
    model = make_model(family)
    sequences = _ids(SEQUENCES)[:: 1 if order == "forward" else -1]
    packed = _packed_logprobs(model, sequences)
    with packed_as(make_layout([len(s) for s in sequences])):
        packed_gradients = gradients(model.module, packed[:, 5].sum())
    single = torch.cat([alone(model.module, s) for s in sequences])
    single_gradients = gradients(model.module, single[:, 5].sum())
    assert (packed - single).abs().max() < 1e-5
    assert packed_gradients.keys() == single_gradients.keys()
    for name, expected in single_gradients.items():
        scale = max(1.0, float(expected.abs().max()))
        assert (packed_gradients[name] - expected).abs().max() / scale < 1e-5, name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mistral_sliding"])
def test_a_truncated_sequence_keeps_the_values_of_its_prefix(family: str) -> None:
    model = make_model(family)
    whole = _ids(SEQUENCES)
    cut = [whole[0], whole[2][:5], whole[3]]
    packed = _packed_logprobs(model, cut)
    expected = torch.cat(
        [alone(model.module, whole[0]), alone(model.module, whole[2])[:5], alone(model.module, whole[3])]
    )
    assert (packed - expected).abs().max() < 1e-5


def test_sequences_of_very_different_length_attend_in_buckets() -> None:
    lengths = [600, *[3] * 40]
    layout = make_layout(lengths)
    assert len(layout.buckets) == 2
    assert layout.padded_tokens == sum(lengths)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, sum(lengths), 4, generator=generator) for _ in range(3))
    module = torch.nn.Identity()
    with packed_as(layout):
        packed, _ = packed_sdpa(module, query, key, value, None)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        with packed_as(make_layout([length])):
            single, _ = packed_sdpa(module, query[:, :, part], key[:, :, part], value[:, :, part], None)
        assert torch.allclose(packed[:, part], single, atol=1e-6)
        start += length


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_layout_places_every_token_once_and_counts_positions_from_zero(lengths: list[int]) -> None:
    layout = make_layout(lengths)
    placed = torch.cat([bucket.tokens for bucket in layout.buckets])
    assert sorted(placed.tolist()) == list(range(sum(lengths)))
    assert layout.position_ids.tolist() == [at for n in lengths for at in range(n)]
    for bucket in layout.buckets:
        assert len(set(bucket.slots.tolist())) == len(bucket.slots)
        assert int(bucket.slots.max()) < bucket.num * bucket.longest


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        make_layout([3, 0])


def test_scores_with_a_soft_cap_are_refused_by_name() -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    with packed_as(make_layout([2])), pytest.raises(ConfigError, match="softcap"):
        packed_sdpa(torch.nn.Identity(), tensor, tensor, tensor, None, softcap=30.0)


def test_the_self_check_passes_on_packed_attention_and_refuses_a_leak() -> None:
    assert check_packing(make_model("qwen3")) < 1e-6
    # gpt-oss does not pass positions to transformers' mask code: its own attention leaks over the boundary.
    with pytest.raises(ConfigError, match="see each other"):
        check_packing(make_model("gpt_oss", implementation="eager"))
