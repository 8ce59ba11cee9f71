"""Leases: one run at a time, the newest attempt, and nothing of one attempt for another (R28)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moorage.core.errors import EnvServerError
from moorage.env.leases import Holder, Leases
from moorage.env.protocol import LEASE_S

A1, A2 = Holder("run", 1, "train/a"), Holder("run", 2, "train/a")
OTHER = Holder("other", 1, "train/a")


def test_a_newer_attempt_takes_over_and_the_older_is_refused_for_ever() -> None:
    leases = Leases()
    assert leases.hello(A1, 0.0) is None
    assert leases.hello(A2, 1.0) == A1
    with pytest.raises(EnvServerError, match="attempt 2 has taken over"):
        leases.check(A1, 2.0)
    leases.bye(A2)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.hello(A1, 3.0)


@pytest.mark.parametrize("after", [A2, OTHER])
def test_who_comes_after_a_lost_lease_is_told_of_the_attempt_before(after: Holder) -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    assert leases.expire(LEASE_S) == [A1]
    assert leases.hello(after, 100.0) == A1
    with pytest.raises(EnvServerError, match="has taken over"):
        leases.hello(A1, 200.0)


def test_another_run_waits_for_the_lease_and_is_told_whose_it_is() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    with pytest.raises(EnvServerError, match=r"leased by run 'run' attempt 1 \(train/a\)"):
        leases.hello(OTHER, 1.0)
    leases.bye(A1)
    assert leases.hello(OTHER, 1.0) == A1
    leases.bye(OTHER)
    assert leases.hello(A1, 2.0) == OTHER, "it said bye: nothing of it was taken"


def test_two_sources_of_one_attempt_share_a_server() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    assert leases.hello(Holder("run", 1, "eval/b"), 0.0) is None
    assert len(leases.holders) == 2
    assert leases.hello(A2, 1.0) in (A1, Holder("run", 1, "eval/b"))
    assert leases.hello(Holder("run", 2, "eval/b"), 1.0) is None
    assert leases.holders == [A2, Holder("run", 2, "eval/b")]


def test_a_silent_holder_loses_its_lease_until_it_says_hello() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    leases.check(A1, 20.0)
    assert leases.expire(49.0) == []
    assert leases.expire(50.0) == [A1]
    with pytest.raises(EnvServerError, match="lease lost"):
        leases.check(A1, 51.0)
    assert leases.hello(A1, 52.0) is None, "what it had is still its own"
    leases.check(A1, 53.0)


def test_a_server_of_a_run_serves_no_other() -> None:
    leases = Leases("run", 2)
    with pytest.raises(EnvServerError, match="belongs to run 'run'"):
        leases.hello(OTHER, 0.0)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.hello(A1, 0.0)


def test_bye_needs_no_lease_but_the_newest_attempt() -> None:
    leases = Leases("run", 2)
    leases.bye(A2)
    with pytest.raises(EnvServerError, match="out of date"):
        leases.bye(A1)
    with pytest.raises(EnvServerError, match="belongs to run 'run'"):
        leases.bye(Holder("other", 3, "train/a"))


def test_a_run_cannot_end_another_whose_lease_is_lost() -> None:
    leases = Leases()
    leases.hello(A1, 0.0)
    leases.expire(LEASE_S)
    with pytest.raises(EnvServerError, match=r"cannot end run 'run' attempt 1"):
        leases.bye(OTHER)


class LeaseMachine(RuleBasedStateMachine):
    """A server whose state (streams, payloads) belongs to one attempt: nobody else ever comes upon it."""

    holders = st.builds(Holder, st.sampled_from(["r", "q"]), st.integers(1, 3), st.sampled_from(["a", "b"]))

    @initialize()
    def begin(self) -> None:
        self.leases = Leases()
        self.now = 0.0
        self.owner: tuple[str, int] | None = None
        self.robbed: set[tuple[str, int]] = set()

    @rule(holder=holders)
    def hello(self, holder: Holder) -> None:
        attempt = holder.run_id, holder.attempt
        try:
            before = self.leases.hello(holder, self.now)
        except EnvServerError:
            return
        assert attempt not in self.robbed
        if before is not None:
            if self.owner is not None:
                assert self.owner == (before.run_id, before.attempt) != attempt
                self.robbed.add(self.owner)
            self.owner = None
        assert self.owner in (None, attempt), f"{holder} comes upon what {self.owner} had"
        self.owner = attempt

    @rule(holder=holders)
    def ask(self, holder: Holder) -> None:
        try:
            self.leases.check(holder, self.now)
        except EnvServerError:
            return
        assert self.owner == (holder.run_id, holder.attempt)

    @rule(holder=holders)
    def bye(self, holder: Holder) -> None:
        try:
            self.leases.bye(holder)
        except EnvServerError:
            return
        assert self.owner is None or self.owner[0] == holder.run_id
        assert self.owner is None or self.owner[1] <= holder.attempt
        self.owner = None

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)

    @invariant()
    def leases_are_those_of_one_attempt(self) -> None:
        found = {(holder.run_id, holder.attempt) for holder in self.leases.holders}
        assert found <= {self.owner}


LeaseMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
