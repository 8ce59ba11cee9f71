from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.config.base import make_config
from moorage.config.env import SamplingConfig
from moorage.config.orchestrator import OrchestratorConfig
from moorage.core.errors import ConfigError
from moorage.orchestrator.sources import (
    EvalPass,
    EvalSchedule,
    EvalSlots,
    Source,
    TrainPicker,
    resolve_eval,
    resolve_train,
    sampling_request,
)


def make_source(name: str, ratio: float = 1.0, interval: int = 5) -> Source:
    return Source(name, "train", 1, SamplingConfig(), 10.0, ratio=ratio, interval=interval)


def make_schedule(intervals: list[int], **settings) -> EvalSchedule:
    sources = [make_source(f"s{i}", interval=each) for i, each in enumerate(intervals)]
    return EvalSchedule(sources, **{"last_version": 12, "skip_first": False, **settings})


def names(sources) -> list[str]:
    return [source.name for source in sources]


def test_picks_follow_the_ratios_and_the_seed():
    sources = [make_source("a", 3.0), make_source("b", 1.0)]
    picker = TrainPicker(sources, seed=1)
    picks = [picker.pick() for _ in range(4000)]
    assert 0.72 < Counter(picks)["a"] / 4000 < 0.78
    assert [TrainPicker(sources, seed=1).pick() for _ in range(1)] == picks[:1]


def test_a_restored_picker_continues_the_sequence():
    sources = [make_source("a"), make_source("b"), make_source("c")]
    whole = TrainPicker(sources, seed=3)
    picks = [whole.pick() for _ in range(50)]
    half = TrainPicker(sources, seed=3, num_picked=20)
    assert [half.pick() for _ in range(30)] == picks[20:]


def test_a_picker_without_sources_says_what_to_add():
    with pytest.raises(ConfigError, match=r"orchestrator\.train"):
        TrainPicker([], seed=0)


def test_slots_are_served_round_robin_over_passes():
    slots = EvalSlots()
    slots.add([EvalPass(make_source("a"), 0, 3), EvalPass(make_source("b"), 0, 1)])
    served = []
    while (chosen := slots.next()) is not None:
        assert slots.next() is chosen, "until its group is open it stays its turn"
        served.append((chosen.group_id, len(slots)))
        slots.opened()
    assert served == [("eval/a@0/0", 4), ("eval/b@0/0", 3), ("eval/a@0/1", 2), ("eval/a@0/2", 1)]
    assert len(slots) == 0


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 5)), st.integers(1, 4), st.integers(1, 10))
def test_a_pass_opens_each_position_that_misses_episodes_once(done, group_size, num_tasks):
    source = replace(make_source("a"), group_size=group_size)
    pass_ = EvalPass(source, 0, num_tasks, done)
    missing = {at: group_size - done.get(at, 0) for at in range(num_tasks) if done.get(at, 0) < group_size}
    assert pass_.num_left == len(missing)
    opened = {}
    while pass_.num_left:
        opened[pass_.position] = pass_.num_missing
        pass_.advance()
    assert opened == missing


def test_each_pass_has_a_stream_of_its_own():
    assert EvalPass(make_source("a"), 5, 1).stream == "eval/a@5"


def test_evals_fire_at_their_intervals_and_at_both_ends():
    schedule = make_schedule([5, 4])
    fired = {version: names(schedule.due(version)) for version in range(13)}
    assert {version: fired[version] for version in fired if fired[version]} == {
        0: ["s0", "s1"],
        4: ["s1"],
        5: ["s0"],
        8: ["s1"],
        10: ["s0"],
        12: ["s0", "s1"],
    }


def test_a_skipped_version_fires_once_with_the_version_measured():
    schedule = make_schedule([5])
    assert names(schedule.due(0)) == ["s0"]
    assert names(schedule.due(4)) == []
    assert names(schedule.due(11)) == ["s0"]
    assert names(schedule.due(11)) == []


def test_the_first_version_can_be_skipped():
    schedule = make_schedule([5], skip_first=True)
    assert [version for version in range(13) if schedule.due(version)] == [5, 10, 12]


def test_what_was_measured_is_not_due_again_unless_asked():
    assert not make_schedule([5], measured={"s0": 5}).due(5)
    assert names(make_schedule([5], measured={"s0": 5}).due(10)) == ["s0"]
    again = make_schedule([5], measured={"s0": 5}, retrigger=True)
    assert names(again.due(6)) == ["s0"]
    assert not again.due(7)
    assert names(again.due(10)) == ["s0"]


@pytest.mark.parametrize(
    ("measured", "live", "due"),
    [
        ({"s0": 5}, 10, ["s0"]),  # killed inside the measurement at 10, or before it began
        ({"s0": 5}, 9, []),
        ({"s0": 5}, 11, ["s0"]),  # resumed behind it: measured late rather than never
        ({"s0": 10}, 12, ["s0"]),  # the last version is
        ({"s0": 12}, 12, []),
        ({}, 3, ["s0"]),  # not even the start was measured whole
    ],
)
def test_a_measurement_that_never_became_whole_is_due_after_a_resume(measured, live, due):
    assert names(make_schedule([5], measured=measured).due(live)) == due


def test_a_start_that_is_skipped_is_not_missed_after_a_resume():
    schedule = make_schedule([5], skip_first=True, measured={})
    assert not schedule.due(3)
    assert names(schedule.due(5)) == ["s0"]


def make_settings(**extra) -> OrchestratorConfig:
    env = {"taskset": {"id": "x"}}
    data = {"train": [{"name": "a", "env": env, "sampling": {"temperature": 0.7}}, {"name": "b", "env": env}]}
    return make_config(OrchestratorConfig, {**data, **extra})


def test_sources_inherit_what_they_do_not_set():
    config = make_settings(sampling={"max_tokens": 9, "temperature": 0.9}, group_size=4)
    first, second = resolve_train(config)
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.7, 9)
    assert (second.sampling.temperature, second.group_size) == (0.9, 4)
    assert second.algorithm == {"type": "grpo"}
    assert first.stream == "train/a"


def test_eval_sources_inherit_from_the_eval_block():
    eval_block = {"interval": 7, "group_size": 2, "sources": [{"name": "m", "env": {"taskset": {"id": "x"}}}]}
    (source,) = resolve_eval(make_settings(eval=eval_block))
    assert (source.interval, source.group_size, source.split) == (7, 2, "eval")


def test_neutral_sampling_is_left_out_of_the_request():
    assert sampling_request(SamplingConfig()) == {"temperature": 1.0}
    full = SamplingConfig(top_p=0.9, top_k=5, min_p=0.1, max_tokens=3, seed=1, extra_body={"x": 2})
    assert sampling_request(full) == {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "max_tokens": 3,
        "seed": 1,
        "x": 2,
    }
