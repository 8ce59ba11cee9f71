"""Rows: which tokens are members, chosen before any arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ExchangeError
from moorage.payload.assemble import Assembled, placeholder
from moorage.payload.codec import BranchArrays
from moorage.records.payload import PayloadSlice
from moorage.records.sample import MicroBatch, TrainSample
from moorage.trainer.losses import make_loss
from moorage.trainer.metrics import StepMetrics
from moorage.trainer.rows import make_row
from moorage.trainer.step import TrainStep
from tests.unit.trainer.models import make_model


def _assembled(seq_lens=(5, 4), **changes) -> Assembled:
    total = sum(seq_lens)
    rng = np.random.default_rng(0)
    base = Assembled(
        token_ids=rng.integers(2, 90, total).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in seq_lens]).astype(np.int32),
        loss_mask=np.ones(total, bool),
        logprobs=np.full(total, -1.0, np.float32),
        temperatures=np.ones(total, np.float32),
        advantages=np.ones(total, np.float32),
        rl_weights=np.ones(total, np.float32),
        ce_weights=np.zeros(total, np.float32),
        ref_kl_weights=np.zeros(total, np.float32),
        seq_lens=np.array(seq_lens, np.int32),
    )
    return dataclasses.replace(base, **changes)


def _row(arrays: Assembled, **options):
    return make_row(arrays, torch.float32, torch.device("cpu"), **{"replay": False, **options})


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    row = _row(_assembled())
    assert (row.rows + 1).tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert row.sequence.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_token_whose_engine_logprob_is_no_number_is_left_out_and_counted() -> None:
    logprobs = np.full(9, -1.0, np.float32)
    logprobs[[2, 7]] = np.nan, -np.inf
    row = _row(_assembled(logprobs=logprobs))
    assert row.num_unusable == 2
    assert (row.rows + 1).tolist() == [1, 3, 4, 6, 8]
    assert torch.isfinite(row.engine_logprobs).all()


def test_cross_entropy_ignores_the_mask_and_rl_ignores_zero_weights() -> None:
    ce = np.zeros(9, np.float32)
    ce[3] = 0.1
    rl = np.zeros(9, np.float32)
    rl[8] = 2.0
    row = _row(_assembled(ce_weights=ce, rl_weights=rl, loss_mask=np.array([0] * 8 + [1], bool)))
    assert (row.rows + 1).tolist() == [3, 8]
    assert row.ce.tolist() == [0]
    assert row.rl.tolist() == [1]
    assert row.rl_weights.tolist() == [2.0]


def test_a_row_that_trains_nothing_still_computes_one_token() -> None:
    row = _row(_assembled(rl_weights=np.zeros(9, np.float32)))
    assert len(row.rows) == 1
    assert row.rl.numel() == row.ce.numel() == 0


def test_the_last_row_of_each_sequence_is_left_to_the_router() -> None:
    routing = np.ones((9, 2, 2), np.uint8)
    row = _row(_assembled(routed_experts=routing), replay=True)
    assert row.routing[[4, 8]].unique().tolist() == [-1]
    assert row.routing[[0, 1, 2, 3, 5, 6, 7]].unique().tolist() == [1]
    assert _row(_assembled(routed_experts=routing)).routing is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": np.full(9, np.nan, np.float32)}, "no advantage"),
        ({"temperatures": np.zeros(9, np.float32)}, "temperature 0"),
        ({"ref_kl_weights": np.ones(9, np.float32)}, "reference"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ExchangeError, match=message):
        _row(_assembled(**changes))


def test_a_lost_micro_batch_trains_on_nothing() -> None:
    piece = PayloadSlice("u", "s", "a" * 32, 6, 6, ("token_ids",), None, 10)
    lost = placeholder(MicroBatch((TrainSample(piece, (), env="e"),)), {})
    row = _row(lost)
    assert row.dropped
    assert row.rl.numel() == row.ce.numel() == 0


def test_what_is_masked_cannot_reach_loss_or_gradient() -> None:
    """NaN and infinity on masked tokens, and a ratio that overflows outside the trust band (MASK)."""
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1], bool)
    clean = _assembled(loss_mask=mask, rl_weights=mask.astype(np.float32), advantages=mask * np.float32(0.7))
    dirty_logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
    dirty_logprobs[0] = -np.inf
    dirty = dataclasses.replace(
        clean, logprobs=dirty_logprobs, advantages=np.where(mask, clean.advantages, np.nan).astype(np.float32)
    )
    found = []
    for arrays in (clean, dirty):
        model = make_model("qwen3")
        step = TrainStep(model, make_loss({"type": "ipo"}), TrainerConfig(), 1)
        step.backward([_row(arrays)], StepMetrics(step.loss.metric_names))
        found.append({name: p.grad for name, p in model.module.named_parameters()})
    assert all(torch.isfinite(grad).all() for grad in found[1].values())
    assert all(torch.equal(found[0][name], grad) for name, grad in found[1].items())


def test_arrays_keep_the_sampled_kept_sets_with_their_tokens() -> None:
    counts = np.array([0, 0, 2, 0, 1, 0, 3, 0, 0], np.int32)
    ids = np.array([5, 6, 7, 8, 9, 10], np.int32)
    row = _row(_assembled(sampling=(counts, ids)))
    by_token = dict(zip((row.rows + 1).tolist(), row.kept.ids.tolist(), strict=True))
    assert by_token[2] == [5, 6, -1]
    assert by_token[4] == [7, -1, -1]
    assert by_token[6] == [8, 9, 10]
    assert by_token[8] == [-1, -1, -1]


def test_branch_arrays_of_a_blob_are_not_written_to() -> None:
    arrays = BranchArrays(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32))
    arrays.token_ids.flags.writeable = False
    row = _row(_assembled(seq_lens=(3,), token_ids=arrays.token_ids))
    assert row.token_ids.tolist() == [0, 1, 2]


def test_a_lost_micro_batch_leaves_the_gradient_of_a_batch_built_without_it() -> None:
    """The divisor leaves it out too (R6): float64, 1e-12."""
    piece = PayloadSlice("u", "s", "a" * 32, 6, 6, ("token_ids",), None, 10)
    lost = placeholder(MicroBatch((TrainSample(piece, (), env="e"),)), {})
    found = []
    for parts in ([_assembled(), lost], [_assembled()]):
        model = make_model("qwen3", dtype=torch.float64)
        step = TrainStep(model, make_loss({"type": "ipo", "eps": 1.0}), TrainerConfig(), 1)
        rows = [make_row(part, torch.float64, torch.device("cpu"), replay=False) for part in parts]
        step.backward(rows, StepMetrics(step.loss.metric_names))
        found.append({name: p.grad for name, p in model.module.named_parameters()})
    for name, expected in found[1].items():
        assert float((found[0][name] - expected).abs().max()) <= 1e-12 * float(expected.abs().max()), name
