"""Any history of a run leaves every payload owned by exactly one side and freed exactly once (R5).

The same state machine is then run against hand-overs with a bug planted in each, and must find it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moorage.payload.custody import CustodyError
from tests.unit.payload.miniature import BUGS, Episode, MiniRun

branches = st.integers(0, 3)


def in_state(*states: str):
    """The rule applies when some episode is in one of these states."""
    return precondition(lambda self: any(episode.state in states for episode in self.run.episodes))


class RunMachine(RuleBasedStateMachine):
    bugs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.run = MiniRun(self.bugs)

    def pick(self, data: st.DataObject, *states: str) -> Episode:
        return data.draw(st.sampled_from([e for e in self.run.episodes if e.state in states]))

    @rule(split=st.sampled_from(["train", "train", "eval"]))
    def dispatch(self, split) -> None:
        self.run.dispatch(split)

    @rule(split=st.sampled_from(["train", "train", "eval"]), count=branches, large=st.booleans())
    def finish_new(self, split, count, large) -> None:
        self.run.dispatch(split)
        self.run.finish(self.run.episodes[-1], count, large=large)

    @rule(
        split=st.sampled_from(["train", "eval"]),
        count=st.integers(1, 3),
        large=st.booleans(),
        stages=st.integers(1, 3),
    )
    def run_to(self, split, count, large, stages) -> None:
        """An episode that gets far without an accident: acknowledged, in its sink, in a batch."""
        self.finish_new(split, count, large)
        episode = self.run.episodes[-1]
        self.run.acknowledge(episode)
        if stages > 1:
            self.run.to_sink(episode)
        if stages > 2 and split == "train":
            self.run.ship(episode, prune=0)

    @in_state("running")
    @rule(data=st.data(), count=branches)
    def finish(self, data, count) -> None:
        episode = self.pick(data, "running")
        self.run.finish(episode, count)

    @in_state("running")
    @rule(data=st.data(), count=branches)
    def fail_encoding(self, data, count) -> None:
        episode = self.pick(data, "running")
        self.run.fail_encoding(episode, count)

    @in_state("running")
    @rule(data=st.data(), count=branches, stage=st.sampled_from(["reserved", "written", "renamed"]))
    def crash_worker(self, data, count, stage) -> None:
        episode = self.pick(data, "running")
        self.run.crash_worker(episode, count, stage)

    @in_state("running", "replied")
    @rule(data=st.data())
    def cancel(self, data) -> None:
        episode = self.pick(data, "running", "replied")
        self.run.cancel(episode)

    @in_state("running")
    @rule(data=st.data())
    def cancel_inside_keep(self, data) -> None:
        episode = self.pick(data, "running")
        self.run.cancel_inside_keep(episode)

    @in_state("replied")
    @rule()
    def lose_lease(self) -> None:
        self.run.lose_lease()

    @in_state("replied")
    @rule(data=st.data())
    def acknowledge(self, data) -> None:
        episode = self.pick(data, "replied")
        self.run.acknowledge(episode)

    @in_state("owned")
    @rule(data=st.data())
    def drop_group(self, data) -> None:
        episode = self.pick(data, "owned")
        self.run.drop_group(episode)

    @in_state("owned")
    @rule(data=st.data())
    def to_sink(self, data) -> None:
        episode = self.pick(data, "owned")
        self.run.to_sink(episode)

    @in_state("eval_sink")
    @rule(data=st.data())
    def end_eval(self, data) -> None:
        episode = self.pick(data, "eval_sink")
        self.run.end_eval(episode)

    @in_state("train_sink")
    @rule(data=st.data(), stale=st.booleans())
    def filter(self, data, stale) -> None:
        episode = self.pick(data, "train_sink")
        self.run.filter(episode, stale=stale)

    @in_state("train_sink")
    @rule(data=st.data(), prune=st.integers(0, 2))
    def ship(self, data, prune) -> None:
        episode = self.pick(data, "train_sink")
        self.run.ship(episode, prune)

    @precondition(lambda self: self.run.batches)
    @rule(failing=st.integers(0, 2), mapped=st.booleans())
    def train(self, failing, mapped) -> None:
        self.run.train(failing, mapped=mapped)

    @rule(number=st.integers(0, 9), mapped=st.booleans())
    def start_reading(self, number, mapped) -> None:
        held = self.run.spool.outstanding()
        for entry in held[number : number + 1]:
            self.run.start_reading_of(entry.id) if mapped else self.run.start_sending_of(entry.id)

    @rule(mapped=st.booleans(), count=st.integers(1, 2))
    def reader_is_overtaken(self, mapped, count) -> None:
        """A blob is freed and another written while somebody reads it; what that reads is looked at later."""
        self.run_to("train", count, True, 1)
        episode = self.run.episodes[-1]
        for blob_id in episode.ids:
            self.run.start_reading_of(blob_id) if mapped else self.run.start_sending_of(blob_id)
        self.run.drop_group(episode)
        self.finish_new("train", count, True)

    @precondition(lambda self: self.run.readings)
    @rule()
    def end_reading(self) -> None:
        self.run.end_reading()

    @precondition(lambda self: self.run.sendings)
    @rule()
    def end_sending(self) -> None:
        self.run.end_sending()

    @rule(fault=st.sampled_from(["refused", "lost"]))
    def next_delete_fails(self, fault) -> None:
        self.run.fault = fault

    @precondition(lambda self: len(self.run.episodes) > 2)
    @rule()
    def restart_service(self) -> None:
        self.run.restart_service()

    @precondition(lambda self: len(self.run.episodes) > 5)
    @rule()
    def crash_server(self) -> None:
        self.run.crash_server()

    @precondition(lambda self: len(self.run.episodes) > 4)
    @rule(adopt=st.booleans())
    def take_over(self, adopt) -> None:
        self.run.take_over(adopt=adopt)

    @invariant()
    def every_payload_has_one_owner(self) -> None:
        self.run.check()

    def teardown(self) -> None:
        try:
            self.run.fault = None
            while self.run.readings:
                self.run.end_reading()
            while self.run.sendings:
                self.run.end_sending()
            self.run.stop()
            self.run.check()
            assert self.run.store.ledger().outstanding == 0
        finally:
            self.run.close()
        assert self.run.left_files == []


def drive(bugs: frozenset[str], examples: int, steps: int) -> None:
    machine = type("Machine", (RunMachine,), {"bugs": bugs})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_history_frees_every_payload_once() -> None:
    drive(frozenset(), examples=60, steps=40)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_every_history_frees_every_payload_once_at_length() -> None:
    drive(frozenset(), examples=3000, steps=60)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_a_hand_over_is_found(bug) -> None:
    with pytest.raises((AssertionError, CustodyError)):
        drive(frozenset([bug]), examples=300, steps=30)
