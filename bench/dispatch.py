# ruff: noqa: ARG001 - scripted partners take what the real ones take
"""Dispatch behind stragglers: permits in use, CPU per episode, the largest rate.

    python bench/dispatch.py [--episodes 10000] [--scale 0.02]

1. Stragglers: episodes whose durations are lognormal (sigma 1.0), group size 8, cap 256. The share of permits
   in use from the first moment all are taken to the last task sampled, with an episode per permit and, in the
   same run, with whole groups (one run per group, as an environment that scores groups asks for).
2. The orchestrator's CPU per episode with references, dispatcher and train sink together, and the largest
   rate it sustains on one core: an environment that answers at once, episodes ready made. Printed beside the
   share that goes into making nothing but the record of an episode for traces.jsonl, which a run adds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.unit.orchestrator.scripted import (
    Says,
    ScriptedEngines,
    ScriptedEnv,
    ScriptedStore,
    make_episode,
    make_task,
)

from moorage.config.env import SamplingConfig
from moorage.orchestrator.admission import Admission
from moorage.orchestrator.algorithms.grpo import Grpo
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.environments import Environment, Limits
from moorage.orchestrator.episodes import render_episode
from moorage.orchestrator.events import Arrived
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.policy import Policy
from moorage.orchestrator.progress import Unfinished
from moorage.orchestrator.sink_records import SinkLimits, TrainSettings
from moorage.orchestrator.sources import Source, TrainPicker
from moorage.orchestrator.train_sink import TrainSink

CAP, GROUP_SIZE, SIGMA = 256, 8, 1.0


def make_dispatcher(
    env: ScriptedEnv, *, scores_groups: bool, cap: int = CAP
) -> tuple[Dispatcher, Holdings, Outcomes]:
    source = Source("bench", "train", GROUP_SIZE, SamplingConfig(), 600.0)
    holdings, outcomes, ids = Holdings(env.store), Outcomes(), itertools.count()
    dispatcher = Dispatcher(
        {"bench": Environment(source, env, scores_groups)},
        {},
        picker=TrainPicker([source], 0),
        admission=Admission(cap),
        limits=Limits(1, max_events=100_000),
        policy=Policy("policy", 0),
        engines=ScriptedEngines(),
        holdings=holdings,
        outcomes=outcomes,
        window=lambda: 1,
        gate=lambda: None,
        make_id=lambda: f"g{next(ids)}",
        on_open=Unfinished().open,
    )
    return dispatcher, holdings, outcomes


class Usage:
    """Integrates permits that are doing work over time, from the first full moment to the last sample."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.busy = 0
        self.taken: Callable[[], int] = lambda: 0
        self._changed_at = self._full_at = 0.0
        self._area = 0.0
        self._ended: tuple[float, float] | None = None

    def change(self, by: int) -> None:
        now = time.perf_counter()
        if self._full_at:
            self._area += self.busy * (now - self._changed_at)
        self.busy += by
        self._changed_at = now
        if not self._full_at and self.taken() >= self.cap:
            self._full_at = now

    def end(self) -> None:
        """The last task was sampled."""
        self.change(0)
        if self._ended is None:
            self._ended = (self._area, self._changed_at)

    @property
    def share(self) -> float:
        assert self._ended is not None
        assert self._full_at, "the cap was never full: more episodes, or longer ones"
        area, ended_at = self._ended
        return area / (self.cap * (ended_at - self._full_at))


def answer(episode: Any, call: Any) -> Any:
    """The episode, as one of the task that was asked for."""
    episode.task.key, episode.task.hash = call.task["key"], call.task["hash"]
    return episode


async def run_until(
    done: asyncio.Event, *tasks: asyncio.Task[Any], began: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Let tasks that never end run until `done`; (wall, processor) seconds since `began`. Raises what one of
    them raised."""
    waiting = asyncio.create_task(done.wait())
    await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    spent = time.perf_counter() - began[0], time.process_time() - began[1]
    for task in (waiting, *tasks):
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(waiting, *tasks, return_exceptions=True)
    return spent


async def straggle(num_episodes: int, scale_s: float, *, whole_groups: bool) -> float:
    """Share of permits in use. A group run holds its permits until its slowest member is done."""
    usage, rng, store = Usage(CAP), random.Random(0), ScriptedStore()
    ready = make_episode([Says()], make_task(0), None)
    done = asyncio.Event()

    async def one(call: Any, nth: int) -> Any:
        usage.change(1)
        await asyncio.sleep(scale_s * rng.lognormvariate(0.0, SIGMA))
        usage.change(-1)
        return answer(ready.model_copy(update={"task": ready.task.model_copy()}), call)

    class GroupEnv(ScriptedEnv):
        async def sample(self, stream: str, limit: int | None = None) -> Any:
            if len(self.sampled) * GROUP_SIZE >= num_episodes:
                usage.end()
                done.set()
                await asyncio.Event().wait()
            return await super().sample(stream, limit)

        async def run_group(self, call: Any, n: int) -> list[Any]:
            return list(await asyncio.gather(*(self.behave(call, 0) for _ in range(n))))

    env = GroupEnv(store, one, num_tasks=None)
    dispatcher, _, _ = make_dispatcher(env, scores_groups=whole_groups)
    usage.taken = lambda: dispatcher.admission.total
    await run_until(done, asyncio.create_task(dispatcher.run()))
    await dispatcher.close()
    return usage.share


async def rate(num_episodes: int) -> tuple[float, float]:
    """(CPU ms per episode, episodes per second) of dispatcher and train sink, the environment instant."""
    store, rng = ScriptedStore(), random.Random(0)
    made = [
        make_episode([Says(reward=float(rng.random() < 0.5))], make_task(0), store)
        for _ in range(num_episodes)
    ]
    pool = iter(made)
    done = asyncio.Event()

    async def instant(call: Any, nth: int) -> Any:
        await asyncio.sleep(0)
        episode = next(pool, None)
        if episode is None:
            done.set()
            await asyncio.Event().wait()
        return answer(episode, call)

    env = ScriptedEnv(store, instant, num_tasks=None)
    dispatcher, holdings, outcomes = make_dispatcher(env, scores_groups=False)
    sink = TrainSink(
        {"bench": TrainSettings(Grpo(), 1.0, GROUP_SIZE)},
        SinkLimits(seq_len=64, max_off_policy=8, batch_traces=512),
        holdings,
        outcomes,
        on_settled=lambda _: None,
    )

    async def consume() -> None:
        step = 1
        while True:
            event = await dispatcher.events.get()
            assert isinstance(event, Arrived)
            await sink.add(event)
            if sink.is_ready:
                batch = sink.cut(step)
                if batch is not None:
                    sink.shipped(batch)
                    step += 1

    began, cpu = time.perf_counter(), time.process_time()
    tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(consume())]
    wall_s, cpu_s = await run_until(done, *tasks, began=(began, cpu))
    await dispatcher.close()
    return 1000 * cpu_s / num_episodes, num_episodes / wall_s


def record_ms(num_episodes: int = 2000) -> float:
    """CPU per record for traces.jsonl."""
    episode = make_episode([Says()], make_task(0), ScriptedStore())
    began = time.process_time()
    for _ in range(num_episodes):
        render_episode(episode)
    return 1000 * (time.process_time() - began) / num_episodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--scale", type=float, default=1.0, help="median duration of an episode, seconds")
    arguments = parser.parse_args()
    per_episode = asyncio.run(straggle(arguments.episodes, arguments.scale, whole_groups=False))
    per_group = asyncio.run(straggle(arguments.episodes, arguments.scale, whole_groups=True))
    print(f"permits in use: sigma {SIGMA}, cap {CAP}, groups of {GROUP_SIZE}, {arguments.episodes} episodes")
    print(f"  an episode per permit   {per_episode:6.1%}")
    print(f"  whole groups            {per_group:6.1%}")
    costs, rates = zip(*(asyncio.run(rate(arguments.episodes)) for _ in range(3)), strict=True)
    print("orchestrator, instant environment, references (dispatcher and train sink, one core, median of 3)")
    print(f"  CPU per episode         {statistics.median(costs):6.3f} ms")
    print(f"  sustained               {statistics.median(rates):6.0f} episodes/s")
    print(f"  and per record in traces.jsonl {record_ms():.3f} ms (in a thread)")


if __name__ == "__main__":
    main()
