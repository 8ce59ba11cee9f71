"""Environments of the verifiers ecosystem, unchanged, through a real env server (R27)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

from moorage.core.errors import EnvServerError
from moorage.env.client import EnvClient, RolloutCall
from moorage.env.keep import read_payload
from moorage.payload.client import PayloadClient
from moorage.payload.codec import BranchArrays
from moorage.records.payload import Ledger, PayloadRef, PayloadSlice
from tests.support.chatty_model import RENDERER, make_chatty_folder
from tests.support.env_server import TOKEN, Server, env_server
from tests.support.player import last_user
from tests.support.scripted_engine import EngineSettings, Reply, Script, ScriptedEngine

pytestmark = pytest.mark.timeout(300)  # a server starts in seconds on an idle core, in a minute on a busy one
REVERSE = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 5, "shuffle": False}}


@pytest.fixture(scope="module")
def chatty_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty_folder(tmp_path_factory.mktemp("chatty") / "model")


class Play:
    """A server of one env and a client of it."""

    def __init__(self, server: Server, engine: ScriptedEngine, client: EnvClient) -> None:
        self.server = server
        self.engine = engine
        self.client = client
        self._slices: list[PayloadSlice] = []

    async def sample(self) -> dict[str, Any]:
        return (await self.client.sample("train/x")).task

    async def run(self, task: dict[str, Any] | None = None, *, deadline_s: float = 60.0) -> vf.WireEpisode:
        """One episode, of the next task unless one is given."""
        task = await self.sample() if task is None else task
        sampling = {"temperature": 1.0, "max_tokens": 64}
        call = RolloutCall(task, "policy", self.engine.url, 0, sampling, deadline_s)
        return await self.client.run_rollout(call)

    async def blobs(self, episode: vf.Episode) -> dict[str, list[BranchArrays]]:
        """What was kept, fetched over HTTP and released, per agent."""
        found: dict[str, list[BranchArrays]] = {}
        fetcher = PayloadClient(TOKEN, connections=2)
        try:
            for trace in episode.traces:
                payload = read_payload(trace)
                assert payload is not None
                for b in payload.branches:
                    slice_ = PayloadSlice(
                        payload.url,
                        payload.store,
                        b.id,
                        b.num_tokens,
                        b.num_tokens,
                        b.fields,
                        b.routing,
                        b.nbytes,
                    )
                    got = (await asyncio.to_thread(fetcher.fetch, [slice_], 10.0))[b.id]
                    assert isinstance(got, BranchArrays)
                    found.setdefault(trace.agent.name, []).append(got)
                    await asyncio.to_thread(
                        fetcher.release, [PayloadRef(payload.url, payload.store, b.id)], "trainer"
                    )
        finally:
            fetcher.close()
        return found


def play(
    folder: Path,
    model_path: Path,
    env: dict[str, Any],
    script: Script,
    act: Callable[[Play], Any],
    *,
    settings: EngineSettings | None = None,
    **fields: Any,
) -> Ledger | None:
    """Serve `env` in processes of its own, run `act`, say bye; the final ledger."""

    async def run(server: Server, engine: ScriptedEngine) -> Ledger | None:
        async with server.client(source="train/x") as client:
            await client.connect(60.0)
            await act(Play(server, engine, client))
            return await client.bye()

    source = {"name": "x", "env": env}
    with (
        ScriptedEngine(script, model_path, settings) as engine,
        env_server(folder, model_path, source=source, renderer=RENDERER, timeout_s=100.0, **fields) as server,
    ):
        ledger = asyncio.run(run(server, engine))
    assert ledger is not None
    assert ledger.outstanding == 0
    assert ledger.double_frees == 0
    return ledger


def test_a_single_turn_is_kept_fetched_and_freed(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Play) -> None:
        episode = await stage.run()
        assert episode.ok, episode.errors
        assert episode.traces[0].reward == 1.0
        seen = stage.engine.seen[0]
        [blob] = (await stage.blobs(episode))["agent"]
        assert blob.token_ids.tolist() == seen.body["token_ids"] + seen.reply["choices"][0]["token_ids"]

    ledger = play(tmp_path, chatty_model, REVERSE, lambda p: last_user(p)[::-1], act)
    assert ledger is not None
    assert ledger.freed["trainer"] == 1


def trader(prompt: str) -> str:
    """A model that looks the price up, then says it."""
    if "<tool_response>" in prompt:
        return prompt.rsplit("<tool_response>\n", 1)[1].split("\n</tool_response>")[0]
    item = last_user(prompt).removeprefix("price of ").removesuffix("?")
    return f'<tool_call>\n{{"name": "shop_price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


@pytest.mark.slow
def test_tools_of_an_mcp_server_are_called_over_several_turns(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Play) -> None:
        for _ in range(3):
            episode = await stage.run()
            assert episode.ok, episode
            [trace] = episode.traces
            assert trace.reward == 1.0
            assert [node.message.role for node in trace.nodes] == ["user", "assistant", "tool", "assistant"]
            [blob] = (await stage.blobs(episode))["agent"]
            assert blob.routing == (2, 2)
            assert int((blob.loss_mask[1:] > blob.loss_mask[:-1]).sum()) == 2  # two sampled stretches

    env = {"taskset": {"id": "prices"}}
    play(tmp_path, chatty_model, env, trader, act, settings=EngineSettings(routing=(2, 2)))


@pytest.mark.slow
def test_a_harness_that_is_a_program_speaks_over_http(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Play) -> None:
        episode = await stage.run()
        assert episode.ok, episode
        assert episode.traces[0].num_turns == 2
        [blob] = (await stage.blobs(episode))["agent"]
        assert blob.num_trainable == 2 * len("ok!") + 2

    env = {"taskset": {"id": "programs"}, "agent": {"runtime": {"type": "subprocess"}}}
    play(tmp_path, chatty_model, env, lambda _: "ok!", act)


def duo(prompt: str) -> str:
    """Proposes 12+7, and solves it right every other time."""
    if "Set a" in prompt:
        return "12+7"
    duo.solved += 1  # type: ignore[attr-defined]
    return "19" if duo.solved % 2 else "20"  # type: ignore[attr-defined]


duo.solved = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("train_proposer", [True, False])
def test_of_several_agents_only_the_trainable_ones_train(
    tmp_path: Path, chatty_model: Path, train_proposer: bool
) -> None:
    async def act(stage: Play) -> None:
        episode = await stage.run()
        assert episode.ok, episode
        assert sorted(t.agent.name for t in episode.traces) == ["proposer", "solver", "solver"]
        [proposal] = [t for t in episode.traces if t.agent.name == "proposer"]
        assert proposal.reward == 1.0  # one of two solved it
        blobs = await stage.blobs(episode)
        assert len(blobs["solver"]) == 2
        assert ("proposer" in blobs) is train_proposer

    env = {"taskset": {"id": "moorage.tasksets.proposer_solver"}, "train_proposer": train_proposer}
    play(tmp_path, chatty_model, env, duo, act)


def errand(prompt: str) -> str:
    """Both sides of a conversation with a simulated user."""
    if "role-playing a USER" in prompt:
        return "###DONE###" if "Here is tea" in prompt else "I want tea, please."
    return "Here is tea."


@pytest.mark.slow
def test_a_user_simulator_talks_and_only_the_assistant_trains(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Play) -> None:
        episode = await stage.run()
        assert episode.ok, episode
        traces = {t.agent.name: t for t in episode.traces}
        assert traces["assistant"].reward == 1.0
        assert traces["assistant"].metrics["user_turns"] == 2.0
        blobs = await stage.blobs(episode)
        assert list(blobs) == ["assistant"]

    env = {
        "id": "user-sim",
        "taskset": {"id": "errands", "shuffle": False},
        "user": {"harness": {"id": "moorage.env.direct"}},
    }
    play(tmp_path, chatty_model, env, errand, act)


@pytest.mark.slow
def test_agents_may_have_models_of_their_own(tmp_path: Path, chatty_model: Path) -> None:
    async def act(stage: Play) -> None:
        episode = await stage.run()
        assert episode.ok, episode
        models = {seen.body["model"] for seen in stage.engine.seen}
        assert models == {"policy", "teacher"}
        assert sorted(await stage.blobs(episode)) == ["solver"]

    env = {"taskset": {"id": "moorage.tasksets.proposer_solver"}, "proposer": {"model": "teacher"}}
    play(tmp_path, chatty_model, env, duo, act)


def test_an_agent_with_a_client_of_its_own_calls_that_host(tmp_path: Path, chatty_model: Path) -> None:
    with ScriptedEngine(lambda _: "12+7", chatty_model) as other:

        async def act(stage: Play) -> None:
            episode = await stage.run()
            assert episode.ok, episode
            assert other.seen == []  # it was asked over /v1/chat/completions
            assert all("Set a" not in seen.prompt for seen in stage.engine.seen)
            assert sorted(await stage.blobs(episode)) == ["solver"]

        client = {"type": "eval", "base_url": f"{other.url}/v1", "api_key_var": "NO_KEY"}
        env = {"taskset": {"id": "moorage.tasksets.proposer_solver"}, "proposer": {"client": client}}
        play(tmp_path, chatty_model, env, lambda _: Reply("19"), act)


def test_a_taskset_whose_tasks_do_not_survive_the_wire_is_refused_at_the_start(
    tmp_path: Path, chatty_model: Path
) -> None:
    source = {"name": "x", "env": {"taskset": {"id": "forgetful"}}}
    with (
        pytest.raises(RuntimeError, match=r"ForgetfulData\.secret is excluded from serialization"),
        env_server(tmp_path, chatty_model, source=source, renderer=RENDERER),
    ):
        pass


@pytest.mark.slow
def test_environments_that_go_wrong_end_in_the_way_their_task_names(
    tmp_path: Path, chatty_model: Path
) -> None:
    async def act(stage: Play) -> None:
        tasks = {}
        for _ in range(8):
            task = await stage.sample()
            tasks[task["data"]["action"]] = task
        fine = await stage.run(tasks["fine"])
        assert fine.ok
        assert len((await stage.blobs(fine))["agent"]) == 1
        for action, message in {
            "raise": "this env never runs",
            "raise_late": "this env fails after its agent played",
            "reward": "this reward cannot be computed",
            "finalize": "this env cannot be judged",
            "slow": "exceeded its 1s deadline",
        }.items():
            await _check_failure(stage, tasks[action], message)
        flaky = await stage.run(tasks["flaky"])
        assert flaky.ok  # two retries, then it played
        assert len(flaky.errors) == 2
        assert len((await stage.blobs(flaky))["agent"]) == 1
        for _ in range(2):  # each run has a task of its own
            scribbled = await stage.run(tasks["scribble"])
            assert [trace.reward for trace in scribbled.traces] == [1.0]
            await stage.blobs(scribbled)
        with pytest.raises(EnvServerError, match="deadline") as late:
            await stage.run(tasks["slow"], deadline_s=0.5)
        assert late.value.kind == "deadline"

    env = {
        "taskset": {"id": "troubles", "shuffle": False},
        "timeout": {"episode": 1.0},
        "retries": {"rules": [{"message": "not yet", "max_retries": 2}]},
    }
    play(tmp_path, chatty_model, env, lambda _: "yes", act)


async def _check_failure(stage: Play, task: dict[str, Any], message: str) -> None:
    episode = await stage.run(task)
    assert not episode.ok
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    assert any(message in error.message for error in errors), (task["data"]["action"], errors)
    assert all(read_payload(trace) is None for trace in episode.traces)
    assert all(not node.token_ids for trace in episode.traces for node in trace.nodes)
