"""Metrics: every name every step, means by real counts."""

from __future__ import annotations

import pytest
import torch

from moorage.trainer.metrics import MAXIMA, MEANS, SUMS, StepMetrics
from moorage.trainer.world import World

ALONE = World(0, 1, torch.device("cpu"))
CONTRACT = (
    "loss",
    "mismatch_kl/mean",
    "mismatch_kl/max",
    "entropy/mean",
    "perf/padding_share",
    "perf/peak_memory_mib",
    "payload/fetch_s/mean",
    "payload/fetch_s/max",
    "payload/dropped_micro_batches",
    "payload/bytes_fetched",
    "policy/lag/mean",
    "policy/lag/max",
    "time/wait_for_batch",
    "time/fetch",
)


def test_a_step_that_measured_nothing_still_emits_every_series() -> None:
    agreed = StepMetrics(("loss/is_masked",)).agree(ALONE)
    expected = {f"{name}/mean" for name in MEANS} | set(SUMS) | set(MAXIMA) | set(CONTRACT)
    assert expected | {"loss/is_masked/mean"} <= agreed.keys()
    assert set(agreed.values()) == {0.0}


def test_means_weigh_every_token_alike() -> None:
    metrics = StepMetrics()
    metrics.add_mean("mismatch_kl", torch.tensor([1.0]), with_max=True)
    metrics.add_mean("mismatch_kl", torch.tensor([4.0, 4.0, 7.0]), with_max=True)
    metrics.add_mean("mismatch_kl", torch.tensor([]), with_max=True)
    agreed = metrics.agree(ALONE)
    assert agreed["mismatch_kl/mean"] == 4.0
    assert agreed["mismatch_kl/max"] == 7.0


def test_values_that_are_not_finite_are_counted_and_spoil_no_mean() -> None:
    metrics = StepMetrics()
    nan, inf = float("nan"), float("inf")
    metrics.add_mean("mismatch_kl", torch.tensor([nan, 2.0, inf, 4.0]), with_max=True)
    metrics.add_mean("entropy", torch.tensor([nan]))
    metrics.put_max("routing/imbalance", nan)
    agreed = metrics.agree(ALONE)
    assert (agreed["mismatch_kl/mean"], agreed["mismatch_kl/max"], agreed["entropy/mean"]) == (3.0, 4.0, 0.0)
    assert agreed["metrics/non_finite"] == 4


def test_padding_is_what_was_computed_and_not_real() -> None:
    metrics = StepMetrics()
    for real, computed, attended in ((30, 30, 40), (0, 10, 10)):
        metrics.add_sum("tokens/real", real)
        metrics.add_sum("tokens/computed", computed)
        metrics.add_sum("tokens/attended", attended)
    agreed = metrics.agree(ALONE)
    assert agreed["perf/padding_share"] == 0.25
    assert agreed["perf/attention_padding_share"] == pytest.approx(0.2)
