"""An episode decoded piece by piece is the one that validation at once gives."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, ModelCall, TraceTask
from verifiers.v1.types import AssistantMessage, UserMessage

from moorage.env.decode import decode_episode, decode_episodes
from moorage.env.protocol import encode
from moorage.env.runner import dump_episode


def make_episode(prompt: str, answer: str = "olleh") -> vf.Episode:
    task = TraceTask(type="T", data=vf.TaskData(prompt=prompt), key="k", hash="h")
    config = vf.AgentConfig(model="policy", sampling=vf.SamplingConfig(temperature=0.5))
    trace = vf.Trace(
        task=task,
        agent=AgentInfo(config=config, name="solver"),
        nodes=[
            MessageNode(message=UserMessage(content=prompt)),
            MessageNode(parent=0, message=AssistantMessage(content=answer), sampled=True),
        ],
        calls=[ModelCall(node=1, model="policy", endpoint="/chat/completions")],
        info={"note": [1, "two"]},
    )
    return vf.Episode(task=task, traces=[trace, trace.model_copy(update={"id": "other"})], ok=True)


def test_decoding_gives_what_validation_gives() -> None:
    dumped = dump_episode(make_episode("hello"))
    decoded = asyncio.run(decode_episode(encode(dumped)))
    whole = WireEpisode.model_validate(dumped)
    assert decoded == whole
    assert decoded.to_record() == whole.to_record()
    assert [type(trace) for trace in decoded.traces] == [type(trace) for trace in whole.traces]


def test_a_trace_without_calls_or_nodes_is_decoded_as_validation_would() -> None:
    dumped = dump_episode(make_episode("hello"))
    del dumped["traces"][0]["calls"], dumped["traces"][1]["nodes"]
    assert asyncio.run(decode_episode(encode(dumped))) == WireEpisode.model_validate(dumped)


def test_episodes_of_one_task_share_what_is_equal_and_others_do_not() -> None:
    group = [make_episode("hello", "a"), make_episode("hello", "b"), make_episode("other", "c")]
    first, second, third = asyncio.run(decode_episodes(encode([dump_episode(each) for each in group])))
    assert first.task is second.task is first.traces[0].task
    assert first.traces[0].agent.config is third.traces[0].agent.config
    assert first.traces[0].agent is not second.traces[0].agent
    assert third.task.data.prompt == "other"
