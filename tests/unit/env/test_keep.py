"""Keeping an episode: one blob per branch that trains, nothing for one that fails, no array left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import verifiers.v1 as vf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verifiers.v1 import graph
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, UserMessage

from moorage.core.errors import PayloadError
from moorage.env.keep import INFO_KEY, keep_episode, read_payload
from moorage.env.turns import Run, SideTable, Turn
from moorage.payload.account import Outcome
from moorage.payload.codec import BranchArrays, decode
from moorage.payload.spool import Spool

URL, STORE = "http://127.0.0.1:9", "train/test.node"


def make_trace(run: Run, *, name: str = "agent", trainable: bool = True) -> vf.Trace:
    trace = vf.Trace(
        task=TraceTask(type="Task", data=vf.TaskData(prompt="p")),
        agent=AgentInfo(config=vf.AgentConfig(), name=name, trainable=trainable),
        ok=True,
    )
    run.watch(trace)
    return trace


def add_turn(table: SideTable, trace: vf.Trace, said: list[str], seed: int, *, rows: bool = False) -> Turn:
    """Commit a model call to `trace` as the interception does: `said` are the messages before the answer,
    users and assistants in turn; one token per character."""
    messages = [
        UserMessage(content=text) if i % 2 == 0 else AssistantMessage(content=text)
        for i, text in enumerate(said)
    ]
    rng = np.random.default_rng(seed)
    prompt_ids, spans = [], []
    for text in said:
        spans.append((len(prompt_ids), len(prompt_ids) + len(text)))
        prompt_ids += [ord(c) for c in text]
    answer = f"{seed:03d}"
    logprobs = (-rng.random(len(answer))).astype(np.float32)
    turn = Turn(
        prompt_len=len(prompt_ids),
        logprobs=logprobs,
        versions=((seed % 5, 0, len(answer)),),
        rows=rng.integers(0, 8, (len(prompt_ids) + len(answer) - 1, 1, 2)).astype(np.uint8) if rows else None,
    )
    key = logprobs.tolist()
    tokens = TurnTokens.model_construct(
        prompt_ids=prompt_ids,
        completion_ids=[ord(c) for c in answer],
        completion_logprobs=key,
        message_spans=spans,
        is_content=None,
    )
    table.record(trace.id, key, turn)
    response = Response(
        id="r",
        created=0,
        model="m",
        message=AssistantMessage(content=answer),
        finish_reason="stop",
        tokens=tokens,
    )
    graph.prepare_turn(trace, messages).commit(response)
    return turn


def make_episode(*traces: vf.Trace) -> vf.Episode:
    return vf.Episode(task=traces[0].task, traces=list(traces), ok=True)


def open_blob(folder: Path, blob_id: str) -> BranchArrays:
    [path] = folder.rglob(f"{blob_id}*")
    return decode(path.read_bytes())


@pytest.fixture
def spool(tmp_path: Path):
    spool = Spool(tmp_path, "run.1", 1 << 30)
    yield spool
    spool.close()


def test_a_turn_shared_by_two_branches_trains_once(tmp_path: Path, spool: Spool) -> None:
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        trace = make_trace(run)
        add_turn(table, trace, ["hello"], 1)
        add_turn(table, trace, ["hello", "001", "left"], 2)
        add_turn(table, trace, ["hello", "001", "right"], 3)
        episode = make_episode(trace)
        keep_episode(episode, spool, "r1", table, URL, STORE)
    payload = read_payload(trace)
    assert payload is not None
    assert [(b.branch, b.num_tokens, b.num_trainable) for b in payload.branches] == [(0, 15, 6), (1, 16, 3)]
    assert [(s.node, s.num_trained) for s in payload.branches[1].spans if s.sampled] == [(1, 0), (5, 3)]
    assert [b.versions for b in payload.branches] == [(1, 2), (1, 3)]
    second = open_blob(tmp_path, payload.branches[1].id)
    assert bytes(second.token_ids.astype(np.uint8)) == b"hello001right003"
    assert second.loss_mask.tolist() == [0] * 13 + [1] * 3
    assert second.logprobs[5:8].all()  # context keeps its log-probabilities


def test_no_per_token_value_is_left_on_any_node(spool: Spool) -> None:
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        trained, frozen = make_trace(run), make_trace(run, name="judge", trainable=False)
        add_turn(table, trained, ["a" * 50], 1, rows=True)
        add_turn(table, frozen, ["b" * 50], 2)
        episode = make_episode(trained, frozen)
        keep_episode(episode, spool, "r1", table, URL, STORE)
    text = episode.model_dump(mode="json")
    assert longest_numbers({**text, "traces": [{**t, "info": {}} for t in text["traces"]]}) == 0
    assert [len(t.info[INFO_KEY]["branches"]) for t in episode.traces] == [1, 0]
    assert spool.ledger().kept == 1


def longest_numbers(value: object) -> int:
    """Length of the longest list of plain numbers anywhere in `value`."""
    if isinstance(value, dict):
        return max((longest_numbers(item) for item in value.values()), default=0)
    if isinstance(value, list):
        own = len(value) if value and all(isinstance(x, int | float) for x in value) else 0
        return max([own, *(longest_numbers(item) for item in value)])
    return 0


def test_an_episode_that_is_not_ok_keeps_nothing(spool: Spool) -> None:
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        trace = make_trace(run)
        add_turn(table, trace, ["hello"], 1)
        episode = make_episode(trace)
        episode.ok = False
        keep_episode(episode, spool, "r1", table, URL, STORE)
    assert read_payload(trace) is None
    assert trace.nodes[1].token_ids == []
    assert spool.ledger().kept == 0


def test_a_branch_that_cannot_be_kept_frees_the_others_and_fails_the_episode(tmp_path: Path) -> None:
    small = Spool(tmp_path, "run.1", 1500)
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        first, second = make_trace(run), make_trace(run)
        add_turn(table, first, ["hello"], 1)
        add_turn(table, second, ["x" * 3000], 2)
        episode = make_episode(first, second)
        keep_episode(episode, small, "r1", table, URL, STORE)
    assert not episode.ok
    assert "larger than the whole spool budget" in episode.errors[-1].message
    assert read_payload(first) is None
    ledger = small.ledger()
    assert (ledger.kept, ledger.freed["env_server"], ledger.outstanding) == (1, 1, 0)
    assert list(tmp_path.rglob("*.safetensors")) == []
    small.close()


def test_a_sibling_episode_of_the_same_request_keeps_its_blobs(tmp_path: Path) -> None:
    small = Spool(tmp_path, "run.1", 1500)
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        good, bad = make_trace(run), make_trace(run)
        add_turn(table, good, ["hello"], 1)
        add_turn(table, bad, ["x" * 3000], 2)
        keep_episode(make_episode(good), small, "r1", table, URL, STORE)
        keep_episode(make_episode(bad), small, "r1", table, URL, STORE)
    assert small.ledger().outstanding == 1
    payload = read_payload(good)
    assert payload is not None
    assert open_blob(tmp_path, payload.branches[0].id).num_tokens == 8
    small.close()


def test_arrays_that_do_not_fit_their_tokens_fail_the_episode_with_the_node(spool: Spool) -> None:
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        trace = make_trace(run)
        turn = add_turn(table, trace, ["hello"], 1)
        key = trace.nodes[1].logprobs
        table.record(trace.id, key, dataclasses.replace(turn, logprobs=turn.logprobs[:2]))
        episode = make_episode(trace)
        keep_episode(episode, spool, "r1", table, URL, STORE)
    assert not episode.ok
    assert "node 1 has 3 sampled tokens and 2 log-probabilities" in episode.errors[-1].message


def test_every_detector_measures_every_trace_of_an_ok_episode(spool: Spool) -> None:
    table = SideTable()
    seen: list[int] = []

    def long(token_ids: np.ndarray, sampled: np.ndarray, logprobs: np.ndarray) -> bool:
        assert len(token_ids) == len(sampled) == len(logprobs)
        seen.append(len(token_ids))
        return len(token_ids) > 10

    with table.begin(model="m", deadline_s=9) as run:
        trained, frozen = make_trace(run), make_trace(run, trainable=False)
        add_turn(table, trained, ["hi"], 1)
        add_turn(table, frozen, ["a longer question"], 2)
        detectors = {"long": long, "never": lambda *_: False}
        keep_episode(make_episode(trained, frozen), spool, "r1", table, URL, STORE, detectors)
    assert seen == [5, 20]
    assert [read_payload(t).detected for t in (trained, frozen)] == [  # type: ignore[union-attr]
        {"long": False, "never": False},
        {"long": True, "never": False},
    ]


def test_turns_are_forgotten_when_their_run_ends() -> None:
    table = SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        trace = make_trace(run)
        add_turn(table, trace, ["hello"], 1)
        assert len(table) == 1
    assert len(table) == 0
    assert table.find(trace.id, trace.nodes[1].logprobs) is None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 3), max_size=4)), max_size=3)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_episodes_keep_byte_identical_arrays_and_every_sampled_token_once(
    tmp_path: Path, shape: list[tuple[int, bool, list[int]]]
) -> None:
    """Agents that train or not, each with forked conversations of random depth."""
    spool, table = Spool(tmp_path, f"run.{len(list(tmp_path.iterdir()))}", 1 << 30), SideTable()
    with table.begin(model="m", deadline_s=9) as run:
        traces, turns, seed = [], {}, 0
        for agent, trainable, forks in shape:
            trace = make_trace(run, name=f"agent{agent}", trainable=trainable)
            traces.append(trace)
            for depth in forks or [0]:
                said = [f"fork {seed}"] if depth == 0 else ["start"]
                for _ in range(depth + 1):
                    seed += 1
                    turns[trace.id, f"{seed:03d}"] = add_turn(table, trace, said, seed, rows=agent == 1)
                    said = [*said, f"{seed:03d}", "more"]
        if not traces:
            return
        episode = make_episode(*traces)
        keep_episode(episode, spool, "r1", table, URL, STORE)
    assert episode.ok
    for trace in traces:
        payload = read_payload(trace)
        assert payload is not None
        trained = _check_trace(tmp_path, trace, payload, turns)
        sampled = [i for i, node in enumerate(trace.nodes) if node.sampled]
        assert sorted(trained) == (sampled if trace.agent.trainable else [])
    assert spool.ledger().kept == sum(len(t.info[INFO_KEY]["branches"]) for t in traces)
    spool.close()


def _check_trace(folder: Path, trace: vf.Trace, payload, turns: dict) -> list[int]:
    trained = []
    for branch in payload.branches:
        arrays = open_blob(folder, branch.id)
        assert arrays.num_tokens == branch.num_tokens
        assert arrays.num_trainable == branch.num_trainable
        assert arrays.routing == branch.routing
        for span in branch.spans:
            message = trace.nodes[span.node].message
            text = bytes(arrays.token_ids[span.start : span.stop].astype(np.uint8)).decode()
            assert text == message.content
            if span.num_trained:
                trained.append(span.node)
                turn = turns[trace.id, text]
                assert arrays.logprobs[span.start : span.stop].tobytes() == turn.logprobs.tobytes()
                if turn.rows is not None:
                    got = arrays.routed_experts[: span.stop - 1]
                    assert got.shape == turn.rows.shape
    return trained


def test_a_spool_that_is_gone_fails_the_episode_with_its_folder(tmp_path: Path) -> None:
    table = SideTable()

    class Gone:
        def keep(self, *_):
            raise PayloadError(f"payload cannot be written to {tmp_path}")

        def free(self, blob_ids, *_):
            assert list(blob_ids) == []
            return Outcome()

        def remove_file(self, entry):
            raise AssertionError(entry)

    with table.begin(model="m", deadline_s=9) as run:
        trace = make_trace(run)
        add_turn(table, trace, ["hello"], 1)
        episode = make_episode(trace)
        keep_episode(episode, Gone(), "r1", table, URL, STORE)
    assert not episode.ok
    assert str(tmp_path) in episode.errors[-1].message
