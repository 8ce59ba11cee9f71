"""The direct harness: a trace made in process equals one made over HTTP, hooks and failures included."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

from moorage.env.direct import Tools
from tests.support.envs import hooks
from tests.support.player import Stage, last_user, on_stage
from tests.support.scripted_engine import Reply

VOLATILE = ("id", "timing", "timestamp", "time", "runtime", "info", "created", "client", "traceback")


def facts(value: Any) -> Any:
    """A trace's dump without what differs from run to run (ids, clocks, ports)."""
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items() if key not in VOLATILE}
    return [facts(item) for item in value] if isinstance(value, list) else value


def play_all(
    folder: Path, model: Path, env: dict[str, Any], numbers: range, script, *, local: bool
) -> list[Any]:
    async def act(stage: Stage) -> list[Any]:
        episodes = [await stage.play(number, keep=False) for number in numbers]
        return [facts(episode.model_dump(mode="json")) for episode in episodes]

    return on_stage(folder, model, env, script, act, local=local)


def test_hooks_limits_and_stops_leave_the_same_trace_in_process_and_over_http(
    tmp_path: Path, chatty_model: Path
) -> None:
    env = {"taskset": {"id": "hooks"}, "agent": {"max_turns": 3, "max_output_tokens": 14}}
    numbers = range(len(hooks.ACTIONS))

    def script(prompt: str) -> str:
        return last_user(prompt)[::-1]

    here = play_all(tmp_path / "a", chatty_model, env, numbers, script, local=True)
    there = play_all(tmp_path / "b", chatty_model, env, numbers, script, local=False)
    assert here == there
    by_action = dict(zip(hooks.ACTIONS, here, strict=True))
    assert by_action["plain"]["ok"]
    assert by_action["stop_second"]["traces"][0]["stop_condition"] == "second_turn"
    assert by_action["rewrite"]["traces"][0]["response_rewrites"]
    assert by_action["hush"]["traces"][0]["nodes"][1]["message"]["content"] == "hush"
    assert not by_action["broken"]["ok"]
    assert "this hook is broken" in str(by_action["broken"])


def test_a_refusing_engine_leaves_the_same_trace_in_process_and_over_http(
    tmp_path: Path, chatty_model: Path
) -> None:
    env = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}

    def script(_: str) -> Reply:
        return Reply("not that one", status=404)

    [here] = play_all(tmp_path / "a", chatty_model, env, range(1), script, local=True)
    [there] = play_all(tmp_path / "b", chatty_model, env, range(1), script, local=False)
    for episode in (here, there):
        [trace] = episode["traces"]
        assert trace["errors"][-1]["type"] == "ProviderError"
        assert trace["errors"][-1]["message"].endswith("answered 404: not that one")
        assert [call["error"]["status_code"] for call in trace["calls"]] == [404]
        assert trace["stop_condition"] == "provider_error"


def test_what_the_model_gets_wrong_about_a_tool_is_told_to_it() -> None:
    tools = Tools([], {}, {})
    assert "not valid JSON" in asyncio.run(tools.run("price", "{"))
    assert "must be a JSON object, not list" in asyncio.run(tools.run("price", "[]"))
    assert "there is no tool 'price'" in asyncio.run(tools.run("price", "{}"))


@pytest.mark.parametrize("local", [True, False])
def test_a_prompt_of_messages_and_a_system_prompt_reach_the_model(
    tmp_path: Path, chatty_model: Path, local: bool
) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play(0, keep=False)
        assert episode.ok
        assert [node.message.role for node in episode.traces[0].nodes][:2] == ["system", "user"]
        assert stage.engine.seen[0].prompt.startswith("<|im_start|>system\nbe brief")

    on_stage(tmp_path, chatty_model, {"taskset": {"id": "hooks"}}, lambda _: "x", act, local=local)


def test_a_cancelled_episode_aborts_its_call_and_leaves_nothing(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        playing = asyncio.create_task(stage.play())
        await asyncio.wait({playing}, timeout=1.0)
        assert len(stage.engine.seen) == 1
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert len(stage.engine.aborted) == 1
        assert len(stage.service.turns) == 0
        assert stage.service.engine.stats.in_flight == {stage.engine.url: 0}

    env = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
    on_stage(tmp_path, chatty_model, env, lambda _: Reply("late", delay_s=20.0), act)


def test_an_interaction_resumes_on_the_conversation_so_far(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> vf.Episode:
        return await stage.play()

    env = {"id": "chatter", "taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
    episode = on_stage(tmp_path, chatty_model, env, lambda p: f"{p.count('user')} so far", act)
    assert episode.ok
    assert [m.content for m in episode.traces[0].messages if m.role == "assistant"] == [
        "1 so far",
        "2 so far",
    ]
    assert episode.traces[0].num_branches == 1
