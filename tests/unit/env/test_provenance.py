"""Dispatch facts on episodes, in the words of the environment library (R12, R15)."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.episode import EvalRunInfo, TrainRunInfo
from verifiers.v1.trace import TraceTask

from moorage.env.provenance import stamp


def make_episode() -> vf.Episode:
    return vf.Episode(task=TraceTask(type="Task", data=vf.TaskData(prompt="p")))


def over_the_wire(episode: vf.Episode) -> vf.WireEpisode:
    return vf.WireEpisode.model_validate(episode.model_dump(mode="json"))


def test_a_train_episode_says_env_group_run_step_and_span() -> None:
    episode = make_episode()
    stamp(
        episode, env_name="math", group_id="g1", run_id="r", run_name="n", split="train", step=5, span=(3, 4)
    )
    for each in (episode, over_the_wire(episode)):
        assert each.env.name == "math"
        assert each.group is not None
        assert each.group.id == "g1"
        assert isinstance(each.run, TrainRunInfo)
        assert (each.run.id, each.run.name) == ("r", "n")
        assert (each.run.work.type, each.run.work.step) == ("train", 5)
        assert each.run.work.policy is not None
        assert (each.run.work.policy.start, each.run.work.policy.end) == (3, 4)


def test_a_frozen_sampler_has_no_span() -> None:
    episode = make_episode()
    stamp(episode, env_name="math", group_id=None, run_id="r", split="eval", step=2)
    back = over_the_wire(episode)
    assert isinstance(back.run, TrainRunInfo)
    assert (back.run.work.type, back.run.work.policy, back.group) == ("eval", None, None)


def test_a_stand_alone_evaluation_has_no_work() -> None:
    episode = make_episode()
    stamp(episode, env_name="math", group_id="g", run_id="r", split=None)
    assert isinstance(over_the_wire(episode).run, EvalRunInfo)
