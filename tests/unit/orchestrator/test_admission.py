from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.orchestrator.admission import BURST_WINDOW_S, Admission


def test_train_and_eval_share_one_cap():
    admission = Admission(3)
    admission.take("train", 2, 0.0)
    admission.take("eval", 1, 0.0)
    assert admission.wait_s(1, 0.0) is None
    admission.release("train", 1, natural=True)
    assert admission.wait_s(1, 0.0) == 0.0
    assert admission.wait_s(2, 0.0) is None


def test_a_lowered_cap_stops_starts_and_nothing_that_runs():
    admission = Admission(4)
    admission.take("train", 4, 0.0)
    admission.move_cap(2)
    assert admission.total == 4
    admission.release("train", 2, natural=True)
    assert admission.wait_s(1, 0.0) is None
    admission.release("train", 1, natural=True)
    assert admission.wait_s(1, 0.0) == 0.0


def test_a_cap_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Admission(4).move_cap(0)


def test_a_group_run_above_the_cap_starts_alone():
    admission = Admission(4)
    admission.move_cap(2)
    assert admission.wait_s(4, 0.0) == 0.0
    admission.take("train", 1, 0.0)
    assert admission.wait_s(4, 0.0) is None


def test_the_rate_limit_spaces_starts_and_saves_nothing_up():
    admission = Admission(100, episodes_per_minute=60)
    admission.take("train", 1, 10.0)
    assert admission.wait_s(1, 10.0) == 1.0
    assert admission.wait_s(1, 50.0) == 0.0
    admission.take("train", 1, 50.0)
    assert admission.wait_s(1, 50.0) == 1.0


def test_a_burst_is_bounded_and_natural_ends_make_room():
    admission = Admission(100, max_burst=3)
    for _ in range(3):
        assert admission.wait_s(1, 1.0) == 0.0
        admission.take("train", 1, 1.0)
    assert admission.wait_s(1, 1.0) == BURST_WINDOW_S
    admission.release("train", 1, natural=False)
    assert admission.wait_s(1, 1.0) == BURST_WINDOW_S
    admission.release("train", 1, natural=True)
    assert admission.wait_s(1, 1.0) == 0.0
    assert admission.wait_s(1, 1.0 + BURST_WINDOW_S) == 0.0


def test_a_group_run_larger_than_the_burst_still_starts():
    assert Admission(100, max_burst=3).wait_s(8, 0.0) == 0.0


def test_a_permit_that_is_not_in_use_cannot_be_released():
    with pytest.raises(ValueError, match="in use"):
        Admission(4).release("train", 1, natural=True)


@given(st.lists(st.tuples(st.sampled_from(["take", "release"]), st.integers(1, 4)), max_size=60))
def test_permits_in_use_never_rise_above_the_cap(events):
    admission, held = Admission(8, max_burst=5), []
    for at, (event, num) in enumerate(events):
        now = at * 0.5
        if event == "take" and admission.wait_s(num, now) == 0.0:
            admission.take("train", num, now)
            held.append(num)
        elif event == "release" and held:
            admission.release("train", held.pop(), natural=at % 2 == 0)
        assert admission.total == sum(held) <= 8
