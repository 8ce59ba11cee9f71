"""Custody as a state machine: an entry leaves exactly once, whatever is tried."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage.payload.custody import Custody, CustodyError
from moorage.records.payload import PayloadRef

ids = st.sampled_from([f"b{n}" for n in range(6)])
keys = st.sampled_from(["e0", "e1"])


def ref(blob_id: str) -> PayloadRef:
    return PayloadRef("http://h:1", "s", blob_id)


class CustodyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.custody = Custody("train_sink")
        self.model: dict[str, str] = {}
        self.left: list[str] = []

    @rule(key=keys, wanted=st.lists(ids, max_size=3))
    def hold(self, key, wanted) -> None:
        refused = len(set(wanted)) != len(wanted) or any(blob_id in self.model for blob_id in wanted)
        if refused:
            with pytest.raises(CustodyError):
                self.custody.hold(key, map(ref, wanted), now=1.0)
        else:
            self.custody.hold(key, map(ref, wanted), now=1.0)
            self.model |= dict.fromkeys(wanted, key)

    @rule(wanted=st.lists(ids, max_size=3), hand_over=st.booleans())
    def leave(self, wanted, hand_over) -> None:
        def act():
            return self.custody.hand_over(wanted, "trainer") if hand_over else self.custody.release(wanted)

        if len(set(wanted)) != len(wanted) or any(blob_id not in self.model for blob_id in wanted):
            with pytest.raises(CustodyError):
                act()
            return
        assert [r.id for r in act()] == wanted
        for blob_id in wanted:
            del self.model[blob_id]

    @rule(key=keys, hand_over=st.booleans())
    def leave_by_key(self, key, hand_over) -> None:
        expected = {blob_id for blob_id, owner in self.model.items() if owner == key}
        gone = self.custody.hand_over_key(key, "trainer") if hand_over else self.custody.release_key(key)
        assert {r.id for r in gone} == expected
        self.model = {blob_id: owner for blob_id, owner in self.model.items() if owner != key}

    @rule()
    def end(self) -> None:
        assert {r.id for r in self.custody.release_all()} == set(self.model)
        self.model.clear()

    @invariant()
    def balances(self) -> None:
        custody = self.custody
        assert {holding.ref.id: holding.key for holding in custody.outstanding} == self.model
        assert len(custody) == len(self.model)
        assert custody.num_held == sum(custody.num_handed_over.values()) + custody.num_released + len(custody)
        for key in ("e0", "e1"):
            assert set(custody.ids(key)) == {b for b, owner in self.model.items() if owner == key}


TestCustody = CustodyMachine.TestCase
TestCustody.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_error_names_the_blob_and_the_holder() -> None:
    custody = Custody("eval_sink")
    custody.hold("e", [ref("b1")])
    with pytest.raises(CustodyError, match=r"eval_sink already holds payload b1 \(of 'e', now 'f'\)"):
        custody.hold("f", [ref("b1")])
    custody.release(["b1"])
    with pytest.raises(CustodyError, match="eval_sink cannot release payload b1"):
        custody.release(["b1"])
