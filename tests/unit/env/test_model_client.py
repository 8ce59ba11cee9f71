"""The policy inside verifiers: tokens verbatim over turns, routing rows where they are missing, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moorage.env.keep import read_payload
from tests.support.player import Stage, last_user, on_stage
from tests.support.scripted_engine import EngineSettings, Reply

REVERSE = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 3}}
PRICES = {"taskset": {"id": "prices"}}


def shopkeeper(prompt: str) -> str:
    """Asks the tool for the price, then says it."""
    if "<tool_response>" in prompt:
        return prompt.rsplit("<tool_response>\n", 1)[1].split("\n</tool_response>")[0]
    item = last_user(prompt).removeprefix("price of ").removesuffix("?")
    return f'<tool_call>\n{{"name": "shop_price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


def test_what_the_engine_sampled_is_what_is_kept(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert episode.ok
        [blob] = stage.blobs(episode.traces[0])
        request = stage.engine.seen[0]
        choice = request.reply["choices"][0]
        n = len(choice["token_ids"])
        assert blob.token_ids.tolist() == request.body["token_ids"] + choice["token_ids"]
        assert blob.loss_mask.tolist() == [0] * len(request.body["token_ids"]) + [1] * n
        sampled = [np.float32(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        assert blob.logprobs[-n:].tolist() == sampled
        assert not blob.logprobs[:-n].any()
        assert read_payload(episode.traces[0]).branches[0].versions == (7, 7)  # type: ignore[union-attr]

    on_stage(
        tmp_path,
        chatty_model,
        REVERSE,
        lambda p: last_user(p)[::-1],
        act,
        settings=EngineSettings(version="7"),
    )


def test_heads_masks_and_routing_rows_line_up_with_their_tokens(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        [blob] = stage.blobs(episode.traces[0])
        choice = stage.engine.seen[0].reply["choices"][0]
        n = len(choice["token_ids"])
        assert blob.head_ids is not None
        assert blob.head_logprobs is not None
        assert blob.head_ids.shape == (n, 3)
        first = choice["logprobs"]["content"][0]["top_logprobs"]
        assert set(blob.head_ids[0].tolist()) <= {entry["token_id"] for entry in first}
        assert blob.sampling_counts is not None
        assert blob.sampling_ids is not None
        assert blob.sampling_counts[-n:].tolist() == [len(kept) for kept in choice["sampling_mask"]]
        assert blob.sampling_ids.tolist() == [t for kept in choice["sampling_mask"] for t in kept]
        assert blob.routed_experts is not None
        assert blob.routed_experts.shape == (blob.num_tokens, 2, 2)
        assert (blob.routed_experts[-1] == blob.routed_experts[-2]).all()

    settings = EngineSettings(routing=(2, 2), masks=True)
    on_stage(tmp_path, chatty_model, REVERSE, lambda _: "abc", act, settings=settings, head_k=3)


def test_a_token_without_a_usable_logprob_is_left_untrained(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        [blob] = stage.blobs(episode.traces[0])
        assert blob.loss_mask[-4:].tolist() == [1, 0, 1, 1]
        assert blob.logprobs[-3] == 0.0
        assert blob.head_ids is not None
        assert len(blob.head_ids) == 3
        assert stage.service.engine.stats.unusable_tokens == 1

    on_stage(tmp_path, chatty_model, REVERSE, lambda _: Reply("abc", void=(1,)), act, head_k=2)


@pytest.mark.slow
def test_a_continued_turn_repeats_the_tokens_of_the_turn_before(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert episode.ok, episode
        assert episode.traces[0].reward == 1.0
        first, second = stage.engine.seen
        so_far = first.body["token_ids"] + first.reply["choices"][0]["token_ids"]
        assert second.body["token_ids"][: len(so_far)] == so_far
        assert second.body["sampling_params"]["routed_experts_prompt_start"] == len(so_far) - 1
        [blob] = stage.blobs(episode.traces[0])
        answer = second.reply["choices"][0]["token_ids"]
        assert blob.token_ids.tolist() == second.body["token_ids"] + answer
        assert blob.num_trainable == len(first.reply["choices"][0]["token_ids"]) + len(answer)
        assert blob.routed_experts is not None  # one row early: the hole after the first turn is filled

    on_stage(tmp_path, chatty_model, PRICES, shopkeeper, act, settings=EngineSettings(routing=(2, 2)))


def test_rows_that_one_turn_lacked_are_asked_for_by_the_next(tmp_path: Path, chatty_model: Path) -> None:
    replies = iter([Reply("first", rows=False), Reply("second")])

    env = {"id": "chatter", "taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
    seen: list = []

    async def watch(stage: Stage) -> None:
        episode = await stage.play()
        seen.extend(stage.engine.seen)
        [blob] = stage.blobs(episode.traces[0])
        assert blob.routed_experts is not None
        assert len(blob.routed_experts) == len(seen[1].body["token_ids"]) + len("second") + 1

    on_stage(
        tmp_path, chatty_model, env, lambda _: next(replies), watch, settings=EngineSettings(routing=(2, 2))
    )
    assert "routed_experts_prompt_start" not in seen[1].body["sampling_params"]


def test_a_refusing_engine_fails_the_episode_with_its_reason(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert not episode.ok
        assert "no such adapter" in episode.traces[0].errors[-1].message
        assert episode.traces[0].errors[-1].status_code == 404
        assert read_payload(episode.traces[0]) is None

    on_stage(tmp_path, chatty_model, REVERSE, lambda _: Reply("no such adapter", status=404), act)


def test_a_call_that_misses_its_deadline_fails_the_episode_once(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play(deadline_s=0.5)
        assert not episode.ok
        assert "did not complete request" in episode.traces[0].errors[-1].message
        assert len(episode.traces[0].calls) == len(stage.engine.seen) == 1
        assert len(stage.engine.aborted) == 1

    on_stage(tmp_path, chatty_model, REVERSE, lambda _: Reply("late", delay_s=30.0), act)


def test_a_frozen_agents_host_that_is_busy_for_a_moment_is_asked_again(
    tmp_path: Path, chatty_model: Path
) -> None:
    replies = iter([Reply("busy", status=503), Reply("frozen")])

    async def act(stage: Stage) -> None:
        stage.env.config.agent.client.base_url = f"{stage.engine.url}/v1"  # type: ignore[attr-defined]
        episode = await stage.play()
        assert episode.ok, episode
        assert [call.error is None for call in episode.traces[0].calls] == [False, True]

    client = {"type": "eval", "base_url": "http://127.0.0.1:1/v1", "api_key_var": "NO_KEY"}
    on_stage(tmp_path, chatty_model, {**REVERSE, "agent": {"client": client}}, lambda _: next(replies), act)


def test_a_prompt_that_never_fitted_fails_the_episode(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert not episode.ok
        assert "max_model_len 10" in episode.traces[0].errors[-1].message

    on_stage(tmp_path, chatty_model, REVERSE, lambda _: "x", act, settings=EngineSettings(max_model_len=10))


def test_a_conversation_that_outgrows_the_window_ends_with_what_there_is(
    tmp_path: Path, chatty_model: Path
) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert episode.ok, episode
        assert episode.traces[0].num_turns == 1
        assert len(stage.blobs(episode.traces[0])) == 1

    env = {"id": "chatter", "taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
    on_stage(tmp_path, chatty_model, env, lambda _: "x" * 40, act, settings=EngineSettings(max_model_len=60))


def test_an_agent_of_another_model_does_not_train(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        episode = await stage.play()
        assert episode.ok
        assert stage.engine.seen[0].body["model"] == "adapter"
        assert stage.blobs(episode.traces[0]) == []

    on_stage(tmp_path, chatty_model, {**REVERSE, "agent": {"model": "adapter"}}, lambda _: "x", act)


def test_an_agent_with_its_own_client_keeps_verifiers_client(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        stage.env.config.agent.client.base_url = f"{stage.engine.url}/v1"  # type: ignore[attr-defined]
        episode = await stage.play()
        assert episode.ok, episode
        assert stage.engine.seen == []  # it went to /v1/chat/completions
        assert episode.traces[0].last_reply == "frozen"
        assert stage.blobs(episode.traces[0]) == []

    client = {"type": "eval", "base_url": "http://127.0.0.1:1/v1", "api_key_var": "NO_KEY"}
    on_stage(tmp_path, chatty_model, {**REVERSE, "agent": {"client": client}}, lambda _: "frozen", act)


def test_a_reply_never_carries_an_array(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Stage) -> None:
        short = await stage.play(0)
        assert short.ok
        for node in short.traces[0].nodes:
            assert node.token_ids == node.mask == node.logprobs == node.is_content == []
            assert node.routed_experts is None
            assert node.sampling_mask is None
        json.dumps(short.model_dump(mode="json"))

    settings = EngineSettings(routing=(2, 2), masks=True)
    on_stage(tmp_path, chatty_model, REVERSE, lambda _: "y", act, settings=settings)
