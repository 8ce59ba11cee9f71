"""CPU of one do-nothing rollout (one short turn, reward, keep) in the process that runs it, side by side.

- `in process`: the direct harness as env servers use it;
- `over http`: the same harness, calling verifiers' interception server over loopback;
- `openai client`: a harness that talks to the interception server with the openai client and an agent whose
  client is verifiers' own: what such a rollout costs without moorage (it keeps no arrays).

The engine is a script in another process. Printed: best and median over rounds, and a fixed pure-Python loop
of the same moment, so that figures of a busy machine can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import verifiers.v1 as vf  # noqa: E402
from tests.support.chatty_model import make_chatty_folder  # noqa: E402

from moorage.engine.generate import GenerateClient  # noqa: E402
from moorage.engine.render import RendererPool  # noqa: E402
from moorage.env.keep import keep_episode  # noqa: E402
from moorage.env.model_client import ModelService, model_seam, policy_client, serving  # noqa: E402
from moorage.env.resolve import load_env, resolve_env  # noqa: E402
from moorage.env.turns import SideTable  # noqa: E402
from moorage.payload.spool import Spool  # noqa: E402

ENGINE = """
import sys, time
from pathlib import Path
from tests.support.scripted_engine import ScriptedEngine
with ScriptedEngine(lambda _: "ok", Path(sys.argv[1])) as engine:
    print(engine.url, flush=True)
    time.sleep(10_000)
"""
WAYS = ("in process", "over http", "openai client")


async def measure(way: str, url: str, folder: Path, rounds: int, size: int) -> list[float]:
    """CPU milliseconds per rollout of each round."""
    block: dict = {"taskset": {"id": "moorage.tasksets.reverse_text", "num_tasks": 1}}
    if way == "openai client":
        client = {"type": "eval", "base_url": f"{url}/v1", "api_key_var": "MOORAGE_NO_KEY"}
        block["agent"] = {"harness": {"id": "openai_loop"}, "client": client}
    env = load_env(resolve_env(block, "eval")[0])
    service = ModelService(RendererPool(folder / "model", "auto"), GenerateClient(), SideTable())
    spool = Spool(folder / way.replace(" ", "_"), "bench", 1 << 30)
    task = next(iter(env.taskset))
    context = vf.ModelContext("policy", policy_client(url), vf.SamplingConfig(temperature=1.0, max_tokens=8))

    async def one() -> None:
        with service.turns.begin(model="policy", deadline_s=60) as run:
            episode = await env.run_episode(task, context, on_trace=run.watch)
            assert episode.ok, episode
            keep_episode(episode, spool, "bench", service.turns, "http://x", "bench")

    async with serving(env, service) if way != "over http" else _served(env, service):
        await _round(one, size)
        gc.collect()
        gc.freeze()
        taken = [await _round(one, size) for _ in range(rounds)]
        gc.unfreeze()
    await service.engine.close()
    spool.close()
    return taken


@asynccontextmanager
async def _served(env: vf.Env, service: ModelService) -> AsyncIterator[None]:
    with model_seam(service):
        async with env.serving():
            yield


async def _round(one: Callable[[], Awaitable[None]], size: int, concurrency: int = 16) -> float:
    gate = asyncio.Semaphore(concurrency)

    async def gated() -> None:
        async with gate:
            await one()

    start = time.process_time()
    await asyncio.gather(*(gated() for _ in range(size)))
    return (time.process_time() - start) / size * 1e3


def yardstick() -> float:
    """Milliseconds of a fixed loop, to compare moments of one machine."""
    start = time.process_time()
    sum(i * i for i in range(200_000))
    return (time.process_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--size", type=int, default=100)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_chatty_folder(folder / "model")
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(folder / "model")], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().strip()
            best = {}
            for way in args.ways:
                taken = asyncio.run(measure(way, url, folder, args.rounds, args.size))
                best[way] = min(taken)
                middle = statistics.median(taken)
                print(f"{way:>14}: {min(taken):6.2f} ms CPU per rollout (median {middle:.2f}); ", end="")
                print(f"yardstick {yardstick():.1f} ms")
            for way in args.ways[1:]:
                print(f"{way} / {args.ways[0]}: {best[way] / best[args.ways[0]]:.1f}")
        finally:
            engine.kill()
            engine.wait()


if __name__ == "__main__":
    main()
