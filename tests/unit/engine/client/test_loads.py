from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.engine.loads import MAX_SESSIONS, Gauges, Loads, parse_gauges

METRICS = Path(__file__).parents[3] / "data" / "vllm_replies" / "metrics.json"


def test_vllms_own_gauges_are_read() -> None:
    text = json.loads(METRICS.read_text())["body"]
    assert "vllm:num_requests_running{" in text
    assert parse_gauges(text) == Gauges(0.0, 0.0, 0.0)


def test_gauges_sum_over_data_parallel_ranks_and_take_the_fullest_cache() -> None:
    text = "\n".join(
        [
            "# HELP vllm:num_requests_running x",
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 4.0',
            'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1"} 0.5',
        ]
    )
    assert parse_gauges(text) == Gauges(running=7.0, waiting=2.0, cache_usage=0.5)
    assert parse_gauges("") == Gauges()


def test_a_session_stays_where_it_was_and_new_ones_go_to_the_least_loaded() -> None:
    loads = Loads(["a", "b"])
    first = loads.pick("s1")
    loads.begin(first)
    second = loads.pick("s2")
    assert {first, second} == {"a", "b"}
    for _ in range(5):
        loads.begin(first)
    assert loads.pick("s1") == first
    assert loads.pick("s3") == second


def test_work_of_others_seen_in_the_gauges_counts() -> None:
    loads = Loads(["a", "b"])
    loads.begin("b")
    loads.begin("b")
    loads.observe("a", Gauges(running=5, waiting=1))
    loads.observe("b", Gauges(running=2))
    assert loads.pick("s") == "b"
    for _ in range(5):
        loads.begin("b")
    assert loads.estimate("b") == 7
    assert loads.pick("t") == "a"


def test_an_old_gauge_never_hides_what_runs_from_here() -> None:
    loads = Loads(["a"])
    loads.observe("a", Gauges())
    loads.begin("a")
    loads.begin("a")
    assert loads.estimate("a") == 2
    loads.end("a")
    loads.observe("a", Gauges(running=0))
    assert loads.estimate("a") == 1


def test_ending_what_never_began_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no load to end"):
        Loads(["a"]).end("a")


@given(st.lists(st.sampled_from(["begin", "end", "poll"]), max_size=60), st.integers(0, 50))
def test_counts_return_to_zero_and_estimates_are_never_below_them(events: list[str], seen: int) -> None:
    loads = Loads(["a", "b"])
    open_ends = 0
    for event in events:
        if event == "begin":
            loads.begin("a")
            open_ends += 1
        elif event == "end" and open_ends:
            loads.end("a")
            open_ends -= 1
        else:
            loads.observe("a", Gauges(running=float(seen)))
        assert loads.estimate("a") >= loads.own("a") == open_ends
    for _ in range(open_ends):
        loads.end("a")
    assert loads.own("a") == 0


def test_the_table_of_sessions_is_bounded() -> None:
    loads = Loads(["a", "b"])
    for number in range(MAX_SESSIONS + 10):
        loads.pick(f"s{number}")
    assert loads.num_sessions == MAX_SESSIONS
