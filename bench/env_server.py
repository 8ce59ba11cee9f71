"""Rollouts per second and CPU per rollout of moorage's env server and of verifiers' own, side by side.

Both serve the same do-nothing environment (tests/support/envs) with two workers to one client, one after the
other in this run, several times in turn; the last lines give the medians and their ratio.

    python bench/env_server.py [--rollouts 1000] [--concurrent 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support/envs")]

NUM_WORKERS = 2
ENV = {"taskset": {"id": "do_nothing"}, "agent": {"runtime": {"type": "subprocess"}}}


@dataclass
class Figures:
    """What one round measured: per second, and milliseconds of CPU per rollout."""

    rate: float
    broker_ms: float
    worker_ms: float
    client_ms: float

    def __str__(self) -> str:
        return (
            f"{self.rate:7.1f} rollouts/s   worker {self.worker_ms:6.3f} ms   "
            f"broker {self.broker_ms:6.3f} ms   client {self.client_ms:6.3f} ms"
        )


def cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(
    one: Callable[[], Awaitable[Any]], count: int, concurrent: int, broker: int, workers: list[int]
) -> Figures:
    gate = asyncio.Semaphore(concurrent)

    async def gated() -> None:
        async with gate:
            await one()

    before = [cpu_s([broker]), cpu_s(workers), cpu_s([os.getpid()])]
    started = time.perf_counter()
    await asyncio.gather(*(gated() for _ in range(count)))
    wall = time.perf_counter() - started
    used = [cpu_s([broker]), cpu_s(workers), cpu_s([os.getpid()])]
    broker_ms, worker_ms, client_ms = ((b - a) / count * 1000 for a, b in zip(before, used, strict=True))
    return Figures(count / wall, broker_ms, worker_ms, client_ms)


async def moorage_rounds(server: Any, options: argparse.Namespace) -> Callable[[], Awaitable[Figures]]:
    from tests.support.env_server import call

    client = server.client()
    await client.connect(60)
    for _ in range(600):
        if (await client.ping()).load["workers"] == NUM_WORKERS:
            break
        await asyncio.sleep(0.1)
    run = call(deadline_s=600)

    async def once() -> Figures:
        return await measure(
            lambda: client.run_rollout(run),
            options.rollouts,
            options.concurrent,
            server.process.pid,
            server.worker_pids(),
        )

    return once


def _serve_verifiers(queue: Any) -> None:
    from verifiers.v1.serve.pool import serve_env

    serve_env(
        max_workers=NUM_WORKERS,
        elastic=False,
        address="tcp://127.0.0.1:0",
        address_queue=queue,
        config_data=ENV,
        max_concurrent=256,
    )


async def verifiers_rounds(
    address: str, pid: int, options: argparse.Namespace
) -> Callable[[], Awaitable[Figures]]:
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient

    from moorage.env.resolve import load_taskset, resolve_env

    data, _ = resolve_env(ENV, "train")
    task = next(iter(load_taskset(data)))
    client = EnvClient(address)
    config = vf.EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="NONE")

    async def one() -> None:
        episode = await client.run(config, "policy", vf.SamplingConfig(), task.data.model_dump())
        assert episode is not None

    await asyncio.gather(*(one() for _ in range(8)))

    async def once() -> Figures:
        workers = [
            child.pid for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
        return await measure(one, options.rollouts, options.concurrent, pid, workers)

    return once


async def compare(server: Any, address: str, pid: int, options: argparse.Namespace) -> None:
    rounds = {
        "moorage": await moorage_rounds(server, options),
        "verifiers": await verifiers_rounds(address, pid, options),
    }
    figures: dict[str, list[Figures]] = {name: [] for name in rounds}
    for number in range(options.rounds + 1):
        for name, once in rounds.items():
            measured = await once()
            if number:  # the first round warms up
                figures[name].append(measured)
                print(f"{name:10} {measured}", flush=True)
    medians = {
        name: Figures(
            *(statistics.median(getattr(f, field) for f in found) for field in Figures.__annotations__)
        )
        for name, found in figures.items()
    }
    print("median")
    for name, median in medians.items():
        print(f"{name:10} {median}")
    ours, theirs = medians["moorage"], medians["verifiers"]
    print(
        f"ratio      {ours.rate / theirs.rate:.2f} x the rollouts/s, "
        f"worker CPU {ours.worker_ms / theirs.worker_ms:.2f} x, "
        f"broker CPU {ours.broker_ms / theirs.broker_ms:.2f} x"
    )


def main() -> None:
    from tests.support.env_server import env_server

    from moorage.trainer.starter import make_model_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_serve_verifiers, args=(queue,))
    process.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model_folder(Path(folder) / "model", "qwen3")
            with env_server(Path(folder) / "run", model, num_workers=NUM_WORKERS) as server:
                assert process.pid is not None
                asyncio.run(compare(server, queue.get(timeout=240), process.pid, options))
    finally:
        process.terminate()
        process.join(20)


if __name__ == "__main__":
    main()
