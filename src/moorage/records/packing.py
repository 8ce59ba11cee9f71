"""From samples to micro batches per data rank. Pure.

`pack` promises:
- every sample, cut to `seq_len`, is in exactly one micro batch that is not a dummy;
- a micro batch holds at most `seq_len` tokens, and routing of one shape for all its samples or for none (R3);
- every rank gets the same number of micro batches, filled up with dummies that repeat references and own
  nothing (R7); dummies come last;
- ranks are balanced by cost; the i-th micro batches of all ranks are of similar cost, because ranks wait for
  each other at each of them;
- the result is a function of the arguments alone.

Does not know arrays: a cut only lowers `num_tokens` and clips spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moorage.records.sample import MicroBatch, Span, TrainSample

Cost = Callable[[int], float]
"""Cost of training one sequence of n tokens, in any unit."""


@dataclass(frozen=True)
class SequenceCost:
    """`linear * n + quadratic * n ** 2`."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens


def sequence_cost(model_config: Mapping[str, Any]) -> SequenceCost:
    """Training FLOPs per sequence, estimated from a model's `config.json` (dense or mixture of experts).

    Per token 6 FLOPs per active parameter, and per pair of tokens 6 * layers * attention width (the two
    products of causal attention, forward and backward). A config without these numbers counts tokens.
    """
    layers, hidden = model_config.get("num_hidden_layers"), model_config.get("hidden_size")
    heads = model_config.get("num_attention_heads")
    if not layers or not hidden or not heads:
        return SequenceCost()
    width = heads * (model_config.get("head_dim") or hidden // heads)
    kv_share = (model_config.get("num_key_value_heads") or heads) / heads
    attention = hidden * width * (2 + 2 * kv_share)
    experts = model_config.get("num_experts_per_tok") or 0
    ffn = model_config.get("moe_intermediate_size") if experts else None
    ffn = ffn or model_config.get("intermediate_size") or 4 * hidden
    mlp = 3 * hidden * ffn * max(experts, 1)
    head = hidden * (model_config.get("vocab_size") or 0)
    return SequenceCost(6.0 * (layers * (attention + mlp) + head), 6.0 * layers * width)


def cut_sample(sample: TrainSample, num_tokens: int) -> TrainSample:
    """`sample`, at most `num_tokens` long: the slice is shortened, spans are clipped, empty ones go."""
    if sample.num_tokens <= num_tokens:
        return sample
    spans = tuple(cut_span(span, num_tokens) for span in sample.spans if span.start < num_tokens)
    return msgspec.structs.replace(sample, payload=sample.payload.cut(num_tokens), spans=spans)


def cut_span(span: Span, num_tokens: int) -> Span:
    """`span` without what lies at or behind token `num_tokens`."""
    if span.stop <= num_tokens:
        return span
    return msgspec.structs.replace(span, stop=num_tokens)


def pack(
    samples: Sequence[TrainSample], seq_len: int, num_ranks: int = 1, cost: Cost | None = None
) -> list[list[MicroBatch]]:
    """Micro batches of each data rank (`[rank][i]`); see the module's promises. `cost` None counts tokens.

    No samples give `num_ranks` empty lists. Raises ValueError for a sample of no tokens, which could be
    neither fetched nor trained.
    """
    cost = cost or SequenceCost()
    cut = [cut_sample(sample, seq_len) for sample in samples]
    for sample in cut:
        if sample.num_tokens < 1:
            raise ValueError(f"sample of trace {sample.trace_id!r}, branch {sample.branch}, has no tokens")
    bins = _fill_up(_split(_fit(cut, seq_len), num_ranks, cost), num_ranks)
    return _distribute(bins, num_ranks, cost)


def _fit(samples: Sequence[TrainSample], seq_len: int) -> list[list[TrainSample]]:
    """First-fit decreasing, per routing shape. Keeps the order of equal lengths."""
    bins: list[list[TrainSample]] = []
    room: list[int] = []
    kinds: list[object] = []
    for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
        size, kind = sample.num_tokens, sample.payload.routing
        for at, left in enumerate(room):
            if left >= size and kinds[at] == kind:
                bins[at].append(sample)
                room[at] -= size
                break
        else:
            bins.append([sample])
            room.append(seq_len - size)
            kinds.append(kind)
    return bins


def _split(bins: list[list[TrainSample]], num_ranks: int, cost: Cost) -> list[list[TrainSample]]:
    """Split the costliest bins until their number is a multiple of the ranks, as far as that is possible."""
    bins = list(bins)
    target = -(-len(bins) // num_ranks) * num_ranks
    while len(bins) < target:
        splittable = [at for at, members in enumerate(bins) if len(members) > 1]
        if not splittable:
            return bins
        heaviest = max(splittable, key=lambda at: _load(bins[at], cost))
        bins[heaviest : heaviest + 1] = _halve(bins[heaviest], cost)
    return bins


def _halve(members: list[TrainSample], cost: Cost) -> list[list[TrainSample]]:
    """Two non-empty halves of similar cost: costliest first, each to the lighter side."""
    halves: tuple[list[TrainSample], list[TrainSample]] = ([], [])
    loads = [0.0, 0.0]
    for sample in sorted(members, key=lambda sample: -cost(sample.num_tokens)):
        side = 0 if loads[0] <= loads[1] else 1
        if len(halves[0]) + len(halves[1]) == len(members) - 1 and not halves[1 - side]:
            side = 1 - side
        halves[side].append(sample)
        loads[side] += cost(sample.num_tokens)
    return list(halves)


def _fill_up(bins: list[list[TrainSample]], num_ranks: int) -> list[MicroBatch]:
    """Micro batches, with dummies up to a multiple of the ranks. A dummy repeats the smallest micro batch."""
    batches = [MicroBatch(tuple(members)) for members in bins]
    missing = -len(batches) % num_ranks
    if missing:
        smallest = min(batches, key=lambda batch: batch.num_tokens)
        batches += [MicroBatch(smallest.samples, dummy=True)] * missing
    return batches


def _distribute(batches: list[MicroBatch], num_ranks: int, cost: Cost) -> list[list[MicroBatch]]:
    loads = [_load(batch.samples, cost) for batch in batches]
    parts = _improve(_partition(loads, num_ranks), loads)
    ordered = [sorted(part, key=lambda at: (batches[at].dummy, -loads[at], at)) for part in parts]
    return [[batches[at] for at in part] for part in ordered]


def _partition(loads: list[float], num_parts: int) -> list[list[int]]:
    """Largest differencing (Karmarkar-Karp) into parts of equal count; indices into `loads`.

    Each chunk of `num_parts` items starts as one solution with one item per part; the two solutions of
    largest spread are merged, heaviest part with lightest, until one is left.
    """
    order = sorted(range(len(loads)), key=lambda at: -loads[at])
    solutions = [[[at] for at in order[i : i + num_parts]] for i in range(0, len(order), num_parts)]
    if not solutions:
        return [[] for _ in range(num_parts)]

    def weight(part: list[int]) -> float:
        return sum(loads[at] for at in part)

    def spread(solution: list[list[int]]) -> float:
        weights = [weight(part) for part in solution]
        return max(weights) - min(weights)

    while len(solutions) > 1:
        solutions.sort(key=spread, reverse=True)
        first, second = solutions[0], solutions[1]
        first = sorted(first, key=weight, reverse=True)
        second = sorted(second, key=weight)
        solutions[:2] = [[a + b for a, b in zip(first, second, strict=True)]]
    return solutions[0]


def _improve(parts: list[list[int]], loads: list[float], max_swaps: int = 64) -> list[list[int]]:
    """Swap pairs between the heaviest part and another while that lowers (largest load, spread)."""
    parts = [list(part) for part in parts]
    sums = [sum(loads[at] for at in part) for part in parts]
    for _ in range(max_swaps):
        top = max(range(len(parts)), key=sums.__getitem__)
        best: tuple[float, int, int, int] | None = None
        for other in range(len(parts)):
            gap = sums[top] - sums[other]
            if other == top or gap <= 0:
                continue
            for (i, a), (j, b) in itertools.product(enumerate(parts[top]), enumerate(parts[other])):
                moved = loads[a] - loads[b]
                gain = min(moved, gap - moved)  # how far the heavier of the two comes down
                if gain > 1e-12 * sums[top] and (best is None or gain > best[0]):
                    best = (gain, other, i, j)
        if best is None:
            break
        _, other, i, j = best
        moved = loads[parts[top][i]] - loads[parts[other][j]]
        parts[top][i], parts[other][j] = parts[other][j], parts[top][i]
        sums[top] -= moved
        sums[other] += moved
    return parts


def _load(samples: Sequence[TrainSample], cost: Cost) -> float:
    return sum(cost(sample.num_tokens) for sample in samples)
