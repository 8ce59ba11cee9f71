"""One step's numbers, agreed over all ranks by real counts.

A rank may have no member token of some kind, so nothing is averaged per rank: sums and counts travel, with
one all-reduce of sums and one of maxima, over a fixed list of names. Every name is emitted every step (R18);
a mean over nothing is 0. What is not finite enters no mean and no maximum: `metrics/non_finite` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from moorage.trainer.world import World

MEANS = (
    "ce/nll",
    "mismatch_kl",
    "logprob_gap",
    "entropy",
    "importance_ratio",
    "policy/lag",
    "payload/fetch_s",
)
SUMS = (
    "loss",
    "tokens/real",
    "tokens/computed",
    "tokens/attended",
    "tokens/unusable_logprobs",
    "payload/dropped_micro_batches",
    "payload/bytes_fetched",
    "payload/undelivered_deletes",
    "metrics/non_finite",
)
WITH_MAX = frozenset({"mismatch_kl", "logprob_gap", "importance_ratio", "policy/lag", "payload/fetch_s"})
MAXIMA = ("routing/imbalance", "perf/peak_memory_mib", "time/fetch", "time/wait_for_batch")


class StepMetrics:
    """Collects one step's numbers on one rank; `agree` makes them the world's."""

    def __init__(self, loss_metrics: Iterable[str] = ()) -> None:
        self._means = {name: [0.0, 0.0] for name in (*MEANS, *loss_metrics)}
        self._sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        self._maxima: dict[str, float] = dict.fromkeys(
            (*MAXIMA, *(f"{name}/max" for name in sorted(WITH_MAX))), 0.0
        )
        self._plain: dict[str, float] = {}

    def add_mean(self, name: str, values: torch.Tensor, *, with_max: bool = False) -> None:
        """Count `values` into a mean over tokens, and into a maximum."""
        usable = values[torch.isfinite(values)]
        self._sums["metrics/non_finite"] += values.numel() - usable.numel()
        if usable.numel() == 0:
            return
        entry = self._means[name]
        entry[0] += float(usable.double().sum())
        entry[1] += usable.numel()
        if with_max:
            self.put_max(f"{name}/max", float(usable.max()))

    def add_sum(self, name: str, value: float) -> None:
        """Count into a sum over ranks."""
        self._sums[name] += value

    def put_max(self, name: str, value: float) -> None:
        """Count into a maximum over ranks."""
        if not math.isfinite(value):
            self._sums["metrics/non_finite"] += 1
            return
        self._maxima[name] = max(self._maxima[name], value)

    def own_sum(self, name: str) -> float:
        """What this rank has counted into the sum `name` so far."""
        return self._sums[name]

    def put(self, name: str, value: float) -> None:
        """A number that is the same on every rank, or the main rank's own."""
        self._plain[name] = value

    def agree(self, world: World) -> dict[str, float]:
        """The step's metrics over all ranks. Collective."""
        flat = [part for entry in self._means.values() for part in entry] + list(self._sums.values())
        totals = world.all_reduce(torch.tensor(flat, dtype=torch.float64)).tolist()
        maxima = world.all_reduce(
            torch.tensor(list(self._maxima.values()), dtype=torch.float64), "max"
        ).tolist()
        result = dict(self._plain)
        for index, name in enumerate(self._means):
            total, count = totals[2 * index], totals[2 * index + 1]
            result[f"{name}/mean"] = total / count if count else 0.0
        result |= dict(zip(self._sums, totals[2 * len(self._means) :], strict=True))
        result |= dict(zip(self._maxima, maxima, strict=True))
        computed, attended = result["tokens/computed"], result["tokens/attended"]
        result["perf/padding_share"] = 1.0 - result["tokens/real"] / computed if computed else 0.0
        result["perf/attention_padding_share"] = 1.0 - computed / attended if attended else 0.0
        return result
