"""Two built-in engines as processes: weights reloaded in the middle of 64 running requests."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.config.engine import InferenceConfig
from moorage.config.model import ModelConfig
from moorage.config.run import InferenceProcessConfig
from moorage.core.errors import EngineError
from moorage.core.net import find_free_port
from moorage.core.rundir import PeerWatch, RunDir
from moorage.engine.fleet import Fleet
from moorage.engine.generate import GenerateCall, GenerateClient
from moorage.engine.parse import Completion
from moorage.exchange.weights import publish_weights
from moorage.orchestrator.loop import bring_live
from tests.flow.test_orchestrator_run import make_process_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the dense model."""
    from moorage.trainer.starter import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("others") / "model", "qwen3", seed=1)


@pytest.fixture
def replicas(dense_model: Path, tmp_path: Path) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Urls and processes of two replicas."""
    urls, processes = [], []
    for index in range(2):
        port = find_free_port()
        config = InferenceProcessConfig(
            inference=InferenceConfig(
                port=port, device="cpu", dtype="float32", max_model_len=256, seed=index
            ),
            model=ModelConfig(path=str(dense_model)),
            name=f"inference.{index}",
        )
        path = tmp_path / f"inference.{index}.json"
        path.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "moorage.cli.main", "inference", "@", str(path)]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        urls.append(f"http://127.0.0.1:{port}")
    try:
        yield urls, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def call_to(url: str, name: str, sampling: dict[str, Any]) -> GenerateCall:
    return GenerateCall(
        url=url,
        model="policy",
        token_ids=[3, 72, 73, 1, 4],
        sampling=sampling,
        request_id=name,
        deadline_s=60,
    )


def test_an_update_of_both_replicas_loses_none_of_64_requests(
    replicas: tuple[list[str], list[subprocess.Popen[bytes]]], others: Path
) -> None:
    urls, _ = replicas

    async def main() -> tuple[list[Completion], list[Completion]]:
        fleet, client = Fleet(urls, "policy"), GenerateClient()

        async def episode(name: str) -> Completion:
            url = fleet.pick(name)
            fleet.begin(url)
            sampling = {"max_tokens": 200, "ignore_eos": True}
            try:
                return await client.generate(call_to(url, name, sampling))
            finally:
                fleet.end(url)

        try:
            await fleet.wait_ready(90)
            await fleet.label(0)
            tasks = [asyncio.create_task(episode(f"e{i}")) for i in range(64)]
            while sum(g.running for g in (await fleet.poll()).values()) < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert [fleet.loads.own(url) for url in urls] == [32, 32]
            await fleet.update_weights(others, 1)
            running = await asyncio.gather(*tasks)
            later = await asyncio.gather(*(episode(f"late{i}") for i in range(4)))
            assert [fleet.loads.own(url) for url in urls] == [0, 0]
            return list(running), list(later)
        finally:
            await client.close()
            await fleet.close()

    running, later = asyncio.run(main())
    assert [len(c.token_ids) for c in running] == [200] * 64
    assert all([v for v, _, _ in c.weight_versions] == [0, 1] for c in running)
    assert all(c.weight_versions == ((1, 0, 200),) for c in later)


def test_a_replica_that_died_is_named_by_the_update_and_the_other_goes_on(
    replicas: tuple[list[str], list[subprocess.Popen[bytes]]], others: Path
) -> None:
    urls, processes = replicas

    async def main() -> None:
        fleet, client = Fleet(urls, "policy", control_timeout_s=5, load_timeout_s=5), GenerateClient()
        try:
            await fleet.wait_ready(90)
            processes[1].kill()
            processes[1].wait()
            with pytest.raises(EngineError, match="1 of 2 engines failed to pause") as error:
                await fleet.update_weights(others, 1)
            assert urls[1] in str(error.value)
            call = GenerateCall(
                url=urls[0],
                model="policy",
                token_ids=[3, 72, 1, 4],
                sampling={"max_tokens": 3},
                request_id="after",
                deadline_s=20,
            )
            assert (await client.generate(call)).token_ids
        finally:
            await client.close()
            await fleet.close()

    asyncio.run(main())


def test_engines_of_somebody_else_are_brought_to_version_0_whatever_they_held(
    replicas: tuple[list[str], list[subprocess.Popen[bytes]]],
    dense_model: Path,
    others: Path,
    tmp_path: Path,
) -> None:
    """An earlier run has left them with its weights, and died while they were paused."""
    urls, _ = replicas
    run = RunDir(tmp_path / "run")
    config = make_process_config(tmp_path, 3).model_copy(
        update={"foreign_engines": True, "engine_urls": urls}
    )
    publish_weights(run, 0, lambda folder: shutil.copytree(dense_model, folder, dirs_exist_ok=True))

    async def main() -> list[tuple[Completion, Completion]]:
        fleet, client = Fleet(urls, "policy"), GenerateClient()

        async def greedy(url: str, name: str) -> Completion:
            sampling = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}
            return await client.generate(call_to(url, name, sampling))

        try:
            await fleet.wait_ready(90)
            expected = [await greedy(url, "first") for url in urls]
            await fleet.update_weights(others, 20)
            strange = [await greedy(url, "strange") for url in urls]
            assert all(list(s.logprobs) != list(e.logprobs) for s, e in zip(strange, expected, strict=True))
            await fleet._everywhere("pause", fleet._pause)
            assert await bring_live(config, run, fleet, PeerWatch(run, "trainer")) == 0
            return list(zip(expected, [await greedy(url, "last") for url in urls], strict=True))
        finally:
            await client.close()
            await fleet.close()

    for expected, last in asyncio.run(main()):
        assert list(last.logprobs) == list(expected.logprobs)
        assert last.weight_versions == ((0, 0, 20),)
