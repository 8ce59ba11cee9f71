"""Streams: each epoch has every task once, a seed fixes the order, cursors continue (R22, R26)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage.core.errors import ConfigError, EnvServerError
from moorage.env.streams import Streams


def finite(count: int, seed: int | None = None) -> Streams:
    return Streams(lambda: iter(range(count)), infinite=False, seed=seed)


def endless() -> Streams:
    return Streams(itertools.count, infinite=True, seed=None)


def take(streams: Streams, count: int, name: str = "train/a", limit: int | None = None) -> list[int]:
    return [streams.sample(name, limit).task for _ in range(count)]


@given(count=st.integers(1, 60), seed=st.integers(0, 1000), epochs=st.integers(1, 4))
def test_every_epoch_serves_every_task_once(count: int, seed: int, epochs: int) -> None:
    streams = finite(count, seed)
    for _ in range(epochs):
        assert sorted(take(streams, count)) == list(range(count))


def test_epochs_differ_in_order_and_a_seed_fixes_them() -> None:
    first, again, other = finite(50, 7), finite(50, 7), finite(50, 8)
    epochs = [take(first, 50) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert take(again, 150) == list(itertools.chain(*epochs))
    assert take(other, 50) != epochs[0]


def test_the_order_of_a_seed_is_the_same_on_every_machine() -> None:
    assert take(finite(8, 0), 16) == [0, 2, 1, 4, 6, 7, 3, 5, 6, 1, 0, 2, 3, 4, 5, 7]


def test_without_a_seed_the_load_order_wraps() -> None:
    assert take(finite(3), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_streams_of_other_names_start_from_the_beginning() -> None:
    streams = finite(10, 3)
    first = take(streams, 4, "eval/a@0")
    assert take(streams, 4, "eval/a@5") == first
    assert take(streams, 1, "eval/a@0") != first[:1]


def test_a_closed_stream_starts_again() -> None:
    streams = finite(10, 3)
    first = take(streams, 4)
    streams.close("train/a")
    assert take(streams, 4) == first


@given(limit=st.integers(1, 30), seed=st.none() | st.integers(0, 9))
def test_a_limit_serves_the_first_tasks_of_the_order_over_and_over(limit: int, seed: int | None) -> None:
    chosen = take(finite(20, seed), min(limit, 20))
    streams = finite(20, seed)
    for _ in range(3):
        assert sorted(take(streams, len(chosen), "eval/a", limit)) == sorted(chosen)
    assert take(finite(20, seed), len(chosen), "eval/a", limit) == chosen


def test_a_limit_cannot_change_while_a_stream_is_open() -> None:
    streams = finite(10)
    streams.sample("eval/a", 4)
    with pytest.raises(EnvServerError, match="opened with limit 4, not 5"):
        streams.sample("eval/a", 5)


@given(before=st.integers(0, 130), seed=st.none() | st.integers(0, 9), limit=st.none() | st.integers(1, 25))
def test_restore_continues_a_finite_stream(before: int, seed: int | None, limit: int | None) -> None:
    streams = finite(20, seed)
    cursor = (0, 0)
    for _ in range(before):
        served = streams.sample("train/a", limit)
        cursor = (served.epoch, served.position)
    restored = finite(20, seed)
    restored.restore("train/a", *cursor, limit)
    assert take(restored, 45, limit=limit) == take(streams, 45, limit=limit)


@given(before=st.integers(0, 50), limit=st.none() | st.integers(1, 12))
def test_restore_reads_an_endless_stream_forward(before: int, limit: int | None) -> None:
    streams = endless()
    cursor = (0, 0)
    for _ in range(before):
        served = streams.sample("train/a", limit)
        cursor = (served.epoch, served.position)
    restored = endless()
    restored.restore("train/a", *cursor, limit)
    assert take(restored, 20, limit=limit) == take(streams, 20, limit=limit)


def test_an_endless_taskset_is_never_materialised() -> None:
    made = []

    def load():
        for number in itertools.count():
            made.append(number)
            yield number

    streams = Streams(load, infinite=True, seed=None)
    assert streams.num_tasks is None
    assert take(streams, 5) == [0, 1, 2, 3, 4]
    assert len(made) == 5


def test_shuffling_an_endless_taskset_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="shuffle = false"):
        Streams(itertools.count, infinite=True, seed=1)


def test_an_endless_taskset_that_ends_says_so() -> None:
    streams = Streams(lambda: iter(range(2)), infinite=True, seed=None)
    take(streams, 2)
    with pytest.raises(EnvServerError, match="ended after 2 tasks"):
        streams.sample("train/a")


@pytest.mark.parametrize("cursor", [(-1, 0), (0, -1), (0, 11)])
def test_a_cursor_outside_the_taskset_is_refused(cursor: tuple[int, int]) -> None:
    with pytest.raises(EnvServerError, match="no such cursor"):
        finite(10).restore("train/a", *cursor)


def test_an_empty_taskset_is_refused() -> None:
    with pytest.raises(EnvServerError, match="empty"):
        finite(0).sample("train/a")


class StreamMachine(RuleBasedStateMachine):
    """Interleaved streams, saved and restored at any time, against the order spelled out in full."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = finite(7, seed=5)
        whole = finite(7, seed=5)
        self.order = take(whole, 7 * 40)
        self.at = {"a": 0, "b": 0}

    @rule(name=st.sampled_from(["a", "b"]), count=st.integers(1, 9))
    def sample(self, name: str, count: int) -> None:
        if self.at[name] + count > len(self.order):
            return
        for _ in range(count):
            served = self.streams.sample(name)
            assert served.task == self.order[self.at[name]]
            self.at[name] += 1
            assert served.epoch * 7 + served.position == self.at[name]

    @rule(name=st.sampled_from(["a", "b"]), at=st.integers(0, 7 * 39))
    def restore(self, name: str, at: int) -> None:
        self.streams.restore(name, *divmod(at, 7))
        self.at[name] = at

    @rule()
    def restart_with_saved_cursors(self) -> None:
        cursors = {name: self.streams.cursor(name) for name in self.at}
        self.streams = finite(7, seed=5)
        for name, cursor in cursors.items():
            if cursor is not None:
                self.streams.restore(name, *cursor)

    @rule(name=st.sampled_from(["a", "b"]))
    def close(self, name: str) -> None:
        self.streams.close(name)
        self.at[name] = 0

    @invariant()
    def cursors_say_where_the_streams_are(self) -> None:
        for name, at in self.at.items():
            cursor = self.streams.cursor(name)
            assert cursor is None or cursor[0] * 7 + cursor[1] == at


StreamMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestStreamMachine = StreamMachine.TestCase
