"""The queue of scored traces: what makes a batch, how full it is, and what is too stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.orchestrator.sink_records import Scored, SinkLimits
from moorage.orchestrator.trace_queue import FULL_BATCHES, TraceQueue

LENGTHS = st.lists(st.integers(1, 50), max_size=30)


def make_scored(number: int, num_tokens: int, *, group: str = "g", oldest: int | None = 0) -> Scored:
    samples = (SimpleNamespace(num_tokens=num_tokens),)
    return Scored(
        trace=SimpleNamespace(id=f"t{number}"),
        arrived=cast(Any, SimpleNamespace(group=SimpleNamespace(id=group))),
        facts=cast(Any, None),
        samples=cast(Any, samples),
        oldest=oldest,
        advantage=None,
    )


def make_queue(lengths: list[int], *, traces: int | None = None, tokens: int | None = None) -> TraceQueue:
    queue = TraceQueue(SinkLimits(64, 8, traces, tokens))
    for number, length in enumerate(lengths):
        queue.put(make_scored(number, length))
    return queue


@given(LENGTHS, st.integers(1, 10))
def test_a_batch_of_traces_is_the_first_ones(lengths, size) -> None:
    queue = make_queue(lengths, traces=size)
    assert queue.is_ready == (len(lengths) >= size)
    assert [scored.trace.id for scored in queue.next_batch()] == [
        f"t{n}" for n in range(min(size, len(lengths)))
    ]
    assert queue.fullness() == len(lengths) / (FULL_BATCHES * size)


@given(LENGTHS, st.integers(1, 200))
def test_a_batch_of_tokens_is_the_shortest_prefix_that_has_them(lengths, size) -> None:
    queue = make_queue(lengths, tokens=size)
    chosen = [scored.num_tokens for scored in queue.next_batch()]
    assert chosen == lengths[: len(chosen)]
    assert queue.is_ready == (sum(lengths) >= size)
    assert sum(chosen[:-1]) < size
    assert sum(chosen) >= size or chosen == lengths
    assert queue.fullness() == sum(lengths) / (FULL_BATCHES * size)


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), max_size=20), st.data())
def test_what_is_taken_is_gone_from_every_count(traces, data) -> None:
    queue = TraceQueue(SinkLimits(64, 8, None, 100))
    all_scored = [make_scored(n, length, group=group) for n, (length, group) in enumerate(traces)]
    for scored in all_scored:
        queue.put(scored)
    taken = [scored for scored in all_scored if data.draw(st.booleans())]
    for scored in taken:
        queue.take(scored)
    left = [scored for scored in all_scored if scored not in taken]
    assert queue.all == left
    assert len(queue) == len(left)
    assert queue.fullness() == sum(scored.num_tokens for scored in left) / (FULL_BATCHES * 100)
    for group in "abc":
        assert queue.has_group(group) == any(scored.arrived.group.id == group for scored in left)


@pytest.mark.parametrize(("min_fresh", "expected"), [(0, []), (3, ["t0"]), (9, ["t0", "t1"])])
def test_traces_of_a_frozen_policy_are_never_stale(min_fresh, expected) -> None:
    queue = TraceQueue(SinkLimits(64, 8, 4))
    for number, oldest in enumerate((2, 3, None)):
        queue.put(make_scored(number, 1, oldest=oldest))
    assert [scored.trace.id for scored in queue.stale(min_fresh)] == expected


def test_a_bound_that_is_given_counts_traces() -> None:
    assert make_queue([10] * 6, tokens=1000).fullness(max_traces=3) == 2
