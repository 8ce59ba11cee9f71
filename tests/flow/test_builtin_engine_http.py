"""The built-in engine as a process of its own, over HTTP (docs/protocols.md section 3)."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from moorage.core.net import find_free_port
from moorage.trainer.starter import make_model_folder
from tests.unit.engine.builtin.reference import CLOSE, Reference

PROMPT = [3, 72, 73, 74, 75, 76, 1, 4]
LONG = {"max_tokens": 200, "ignore_eos": True, "logprobs": 1}
START_TIMEOUT_S = 90


@dataclass(frozen=True)
class Served:
    url: str
    process: subprocess.Popen[str]
    folders: tuple[Path, Path]


def start(config: dict[str, Any], scratch: Path) -> subprocess.Popen[str]:
    path = scratch / "inference.json"
    path.write_text(json.dumps(config))
    return subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", "inference", "@", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def config_for(folder: Path, **more: Any) -> dict[str, Any]:
    inference = {
        "max_model_len": 256,
        "max_num_seqs": 64,
        "device": "cpu",
        "dtype": "float32",
        "sampling_mask": True,
    }
    return {"inference": {**inference, **more}, "model": {"path": str(folder)}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("engine")
    folders = tuple(make_model_folder(scratch / str(seed), "qwen3", seed=seed) for seed in (0, 1))
    process = start(config_for(folders[0]), scratch)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert " at http://" in line, process.communicate(timeout=10)
        yield Served(line.split(" at ")[1].strip(), process, folders)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait(timeout=30)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


class Caller:
    """Calls one engine."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self.served = served
        self.session = session

    async def post(self, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.served.url + route, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, route: str) -> Any:
        async with self.session.get(self.served.url + route) as answer:
            return await answer.json()

    async def generate(self, sampling: dict[str, Any], prompt: list[int] | None = None, **more: Any) -> Any:
        body = {"token_ids": prompt or PROMPT, "sampling_params": sampling, **more}
        status, reply = await self.post("/inference/v1/generate", body)
        assert status == 200, reply
        return reply["choices"][0]

    async def gauge(self, name: str) -> float:
        async with self.session.get(self.served.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def wait_for_gauge(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                if await self.gauge(name) == value:
                    return
                await asyncio.sleep(0.02)


def call(served: Served, act: Callable[[Caller], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=100)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            caller = Caller(served, session)
            result = await act(caller)
            await caller.wait_for_gauge("num_requests_running", 0)
            await caller.wait_for_gauge("num_requests_waiting", 0)
            return result

    return asyncio.run(main())


def test_a_reload_amid_64_running_requests_loses_none(served: Served) -> None:
    async def act(caller: Caller) -> list[Any]:
        await caller.post("/update_weight_version", {"new_version": "0"})
        prompts = [[*PROMPT, 72 + index % 20] for index in range(70)]
        tasks = [
            asyncio.create_task(caller.generate({**LONG, "seed": index}, prompt))
            for index, prompt in enumerate(prompts)
        ]
        await caller.wait_for_gauge("num_requests_running", 64)
        for route, body in (
            ("/pause?mode=keep&clear_cache=true", None),
            ("/collective_rpc", reload_body(served.folders[1])),
            ("/update_weight_version", {"new_version": "1"}),
        ):
            status, _ = await caller.post(route, body)
            assert status == 200
        assert await caller.get("/is_paused") == {"is_paused": True}
        queued = asyncio.create_task(caller.generate(LONG, PROMPT))
        await caller.wait_for_gauge("num_requests_waiting", 71)
        assert await caller.gauge("num_requests_running") == 0
        await caller.post("/resume")
        choices = await asyncio.gather(*tasks, queued)
        status, _ = await caller.post("/collective_rpc", reload_body(served.folders[0]))
        assert status == 200
        return list(zip([*prompts, PROMPT], choices, strict=True))

    results = call(served, act)
    models = {"0": Reference(served.folders[0]), "1": Reference(served.folders[1])}
    versions = [[span["version"] for span in choice["weight_versions"]] for _, choice in results]
    assert versions == [["0", "1"]] * 64 + [["1"]] * 7
    for prompt, choice in results[::8]:
        assert len(choice["token_ids"]) == 200
        known = np.array([*prompt, *choice["token_ids"]])
        given = np.array([item["logprob"] for item in choice["logprobs"]["content"]])
        for span in choice["weight_versions"]:
            logits = models[span["version"]].logits(known)[len(prompt) - 1 : -1]
            values = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            part = slice(span["start"], span["end"])
            expected = values[np.arange(200), choice["token_ids"]][part]
            np.testing.assert_allclose(given[part], expected, atol=CLOSE, rtol=0)


def reload_body(folder: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}


def test_going_away_frees_the_slot(served: Served) -> None:
    async def act(caller: Caller) -> None:
        tasks = [asyncio.create_task(caller.generate(LONG)) for _ in range(80)]
        await caller.wait_for_gauge("num_requests_running", 64)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await caller.wait_for_gauge("num_requests_running", 0, timeout_s=5)
        await caller.wait_for_gauge("num_requests_waiting", 0, timeout_s=5)

    call(served, act)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_starts_cancels_and_ends_leave_nothing_behind(served: Served, count: int) -> None:
    rng = random.Random(4)

    async def one(caller: Caller) -> str:
        task = asyncio.create_task(
            caller.generate(
                {"max_tokens": rng.randint(1, 60), "ignore_eos": True, "n": rng.choice([1, 1, 2])}
            )
        )
        await asyncio.sleep(rng.random() * 0.5)
        if rng.random() < 0.5:
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, asyncio.CancelledError):
            return "cancelled"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome["finish_reason"]

    async def act(caller: Caller) -> list[str]:
        return await asyncio.gather(*(one(caller) for _ in range(count)))

    outcomes = call(served, act)
    assert set(outcomes) <= {"cancelled", "length"}
    assert len(set(outcomes)) == 2


def test_the_three_ways_to_pause(served: Served) -> None:
    async def act(caller: Caller) -> None:
        for mode in ("keep", "wait", "abort"):
            running = asyncio.create_task(caller.generate({**LONG, "seed": 1}))
            await caller.wait_for_gauge("num_requests_running", 1)
            assert await caller.post(f"/pause?mode={mode}&clear_cache=false") == (200, {"status": "paused"})
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
            later = asyncio.create_task(caller.post("/inference/v1/generate", body))
            if mode == "keep":
                await caller.wait_for_gauge("num_requests_waiting", 1)
                assert not running.done()
            else:
                status, reply = await later
                assert (status, reply["error"]["type"]) == (503, "ServiceUnavailableError")
                choice = await running
                ended = len(choice["token_ids"])
                assert choice["finish_reason"] == {"wait": "length", "abort": "abort"}[mode]
                assert ended == 200 if mode == "wait" else 0 < ended < 200
            assert await caller.post("/resume") == (200, {"status": "resumed"})
            await asyncio.gather(running, later)
        status, reply = await caller.post("/pause?mode=nap")
        assert (status, reply["error"]["param"]) == (400, "mode")

    call(served, act)


def test_a_frozen_request_goes_on_as_if_nothing_had_been(served: Served) -> None:
    async def act(caller: Caller) -> None:
        whole = await caller.generate({**LONG, "seed": 5})
        for clear in ("true", "false"):
            running = asyncio.create_task(caller.generate({**LONG, "seed": 5}))
            await caller.wait_for_gauge("num_requests_running", 1)
            await caller.post(f"/pause?mode=keep&clear_cache={clear}")
            await caller.post("/resume")
            assert (await running)["token_ids"] == whole["token_ids"]

    call(served, act)


def test_requests_are_aborted_by_id_or_all_at_once(served: Served) -> None:
    async def act(caller: Caller) -> None:
        tasks = [asyncio.create_task(caller.generate(LONG, request_id=f"r{index}")) for index in range(3)]
        await caller.wait_for_gauge("num_requests_running", 3)
        status, reply = await caller.post("/abort_requests", {"request_ids": ["generate-tokens-r1", "x"]})
        assert (status, reply) == (200, {"status": "aborted", "aborted": 1})
        assert (await tasks[1])["finish_reason"] == "abort"
        status, reply = await caller.post("/inference/v1/abort_requests", {})
        assert reply == {"status": "aborted", "aborted": 2}
        for choice in await asyncio.gather(*tasks):
            assert choice["finish_reason"] == "abort"
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])

    call(served, act)


def test_masks_are_sent_for_truncated_requests_only(served: Served) -> None:
    async def act(caller: Caller) -> None:
        choice = await caller.generate({"max_tokens": 5, "top_k": 3, "ignore_eos": True})
        assert [len(mask) for mask in choice["sampling_mask"]] == [3] * 5
        assert choice["sampling_mask"] == [sorted(mask) for mask in choice["sampling_mask"]]
        for token, mask in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
            assert token in mask
        assert (await caller.generate({"max_tokens": 2}))["sampling_mask"] is None
        assert (await caller.generate({"max_tokens": 2, "temperature": 0}))["sampling_mask"] is None

    call(served, act)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"token_ids": [1] * 256, "sampling_params": {}}, 400, "256 tokens"),
        ({"token_ids": [], "sampling_params": {}}, 400, "at least one token"),
        ({"token_ids": [1, -2], "sampling_params": {}}, 400, "-2 is outside the vocabulary"),
        ({"token_ids": ["a"], "sampling_params": {}}, 400, "token_ids"),
        ({"sampling_params": {}}, 400, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"top_k": "x"}}, 400, "top_k"),
        ({"token_ids": [1], "sampling_params": {}, "model": "else"}, 404, "`else` does not exist"),
        ({"token_ids": [1], "sampling_params": {}, "cache_salt": "a/b"}, 400, "cache_salt"),
        ({"token_ids": [1], "sampling_params": {}, "stream": True}, 400, "stream"),
        ({"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 2}}, 400, "beyond the prompt"),
        ([1], 400, "must be a JSON object"),
    ],
)
def test_bad_input_is_refused_with_what_is_wrong(served: Served, body: Any, status: int, said: str) -> None:
    got, reply = call(served, lambda caller: caller.post("/inference/v1/generate", body))
    assert got == status
    assert said in reply["error"]["message"]
    assert reply["error"]["code"] == status


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}, "/nowhere"),
        ("/collective_rpc", {"method": "reload_weights"}, "weights_path"),
        ("/collective_rpc", {"method": "sleep"}, "sleep"),
        ("/update_weight_version", {"version": "1"}, "new_version"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids"),
    ],
)
def test_bad_control_calls_are_refused(served: Served, route: str, body: Any, said: str) -> None:
    status, reply = call(served, lambda caller: caller.post(route, body))
    assert status == 400
    assert said in reply["error"]["message"]


def test_a_chat_completion_says_what_generate_says(served: Served) -> None:
    async def act(caller: Caller) -> None:
        chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}], "seed": 3}
        more = {"max_tokens": 12, "ignore_eos": True}
        asked = {**chat, **more, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
        _, reply = await caller.post("/v1/chat/completions", asked)
        choice = reply["choices"][0]
        assert reply["prompt_token_ids"] == [3, 72, 73, 74, 1, 4]
        same = await caller.generate({**more, "seed": 3}, reply["prompt_token_ids"])
        assert choice["token_ids"] == same["token_ids"]
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["content"]) == 12
        for item in choice["logprobs"]["content"]:
            values = [head["logprob"] for head in item["top_logprobs"]]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
        text = choice["message"]["content"]
        events = await read_events(caller, {**chat, **more})
        deltas = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(delta["delta"]["content"] for delta in deltas) == text
        assert [delta["finish_reason"] for delta in deltas[-2:]] == [None, "length"]
        assert events[-1]["usage"]["completion_tokens"] == 12
        stop = text[4:6]
        _, stopped = await caller.post("/v1/chat/completions", {**chat, **more, "stop": [stop]})
        assert stopped["choices"][0]["message"]["content"] == text[: text.find(stop)]
        assert stopped["choices"][0]["stop_reason"] == stop
        assert stopped["usage"]["completion_tokens"] < 12

    call(served, act)


async def read_events(caller: Caller, body: dict[str, Any]) -> list[Any]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with caller.session.post(caller.served.url + "/v1/chat/completions", json=asked) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line[6:] for line in (await answer.text()).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "non-empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
        (
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
            "json",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "needs logprobs"),
    ],
)
def test_bad_chats_are_refused(served: Served, body: Any, said: str) -> None:
    status, reply = call(served, lambda caller: caller.post("/v1/chat/completions", body))
    assert status == 400
    assert said in reply["error"]["message"]


def test_routing_rows_travel_as_npy(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "moe", "qwen3_moe")
    process = start(config_for(folder, routed_experts=True), tmp_path)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].strip()
        served = Served(url, process, (folder, folder))
        sampling = {"max_tokens": 5, "ignore_eos": True, "routed_experts_prompt_start": 3}
        choice = call(served, lambda caller: caller.generate(sampling))
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert rows.dtype == np.uint8
        assert rows.shape == (len(PROMPT) - 3 + 5 - 1, 2, 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_start_that_cannot_work_ends_with_one_line(served: Served, tmp_path: Path) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    cases = {
        "is in use": config_for(served.folders[0], port=port),
        "config.json": config_for(tmp_path / "no model", port=find_free_port()),
        "max_position_embeddings": config_for(served.folders[0], max_model_len=4096),
    }
    started = []
    for number, config in enumerate(cases.values()):
        (tmp_path / str(number)).mkdir()
        started.append(start(config, tmp_path / str(number)))
    for said, process in zip(cases, started, strict=True):
        _, errors = process.communicate(timeout=START_TIMEOUT_S)
        assert process.returncode != 0
        assert said in errors
        assert "Traceback" not in errors
