"""Dispatch facts on episodes, and versions derived from what the engine said."""

from __future__ import annotations

import msgspec
import pytest
import verifiers.v1 as vf
from verifiers.v1.trace import AgentInfo, TraceTask

from moorage.env import provenance
from moorage.env.keep import INFO_KEY
from moorage.records.payload import BranchPayload, TracePayload


def make_episode(*versions: tuple[int, int] | None) -> vf.Episode:
    """An episode with one kept branch per entry, each in a trace of its own."""
    task = TraceTask(type="Task", data=vf.TaskData(prompt="p"))
    traces = []
    for number, span in enumerate(versions):
        trace = vf.Trace(task=task, agent=AgentInfo(config=vf.AgentConfig()))
        branch = BranchPayload(0, str(number), 4, 2, ("token_ids",), None, 10, span, ())
        trace.info[INFO_KEY] = msgspec.to_builtins(TracePayload("http://x", "s", {}, (branch,)))
        traces.append(trace)
    return vf.Episode(task=task, traces=traces)


def test_what_is_stamped_is_what_is_read() -> None:
    episode = make_episode((3, 4))
    provenance.stamp(
        episode, env_name="math", group_id="g1", run_id="r", run_name="n", split="train", step=5, span=(3, 4)
    )
    assert provenance.read_env(episode) == "math"
    assert provenance.read_group(episode) == "g1"
    assert provenance.read_split(episode) == "train"
    assert provenance.read_step(episode) == 5
    assert provenance.read_span(episode) == (3, 4)
    assert provenance.measure_lag(episode, 4) == 1
    assert provenance.measure_drift(episode) == 1


def test_a_frozen_sampler_has_no_span_and_reads_none() -> None:
    episode = make_episode(None)
    provenance.stamp(episode, env_name="math", group_id=None, run_id="r", split="eval", step=2)
    assert provenance.read_split(episode) == "eval"
    assert provenance.read_group(episode) is None
    assert provenance.measure_span(episode) is None
    assert provenance.measure_lag(episode, 9) is None
    assert provenance.measure_drift(episode) is None


def test_a_stand_alone_evaluation_has_no_step() -> None:
    episode = make_episode()
    provenance.stamp(episode, env_name="math", group_id="g", run_id="r", split=None)
    assert provenance.read_split(episode) is None
    assert provenance.read_step(episode) is None


def test_the_span_of_an_episode_covers_all_its_branches() -> None:
    assert provenance.measure_span(make_episode((3, 5), None, (2, 4))) == (2, 5)


def test_the_facts_survive_the_wire() -> None:
    episode = make_episode((3, 4))
    provenance.stamp(episode, env_name="math", group_id="g1", run_id="r", split="train", step=5, span=(3, 4))
    back = vf.WireEpisode.model_validate(episode.model_dump(mode="json"))
    assert provenance.read_span(back) == (3, 4)
    assert provenance.measure_span(back) == (3, 4)


def test_an_episode_that_was_never_stamped_has_no_env() -> None:
    with pytest.raises(ValueError, match="never stamped"):
        provenance.read_env(make_episode())
