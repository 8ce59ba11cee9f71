"""The train sink under random arrivals, failures, cancellations, cuts: every count and payload adds up."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.config.orchestrator import DropConfig
from moorage.core.errors import ConfigError
from moorage.orchestrator.algorithms.grpo import Grpo
from tests.unit.orchestrator.scripted import Says
from tests.unit.orchestrator.sinking import Bench


class Counting(Grpo):
    """GRPO that notes which groups it scored, and lets others run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: Counter[str] = Counter()

    async def score_group(self, group, credit):
        self.scored[group.id] += 1
        await asyncio.sleep(0)
        super().score_group(group, credit)


def random_trace(rng: random.Random, step: int) -> Says:
    start = rng.randint(max(0, step - 4), step)
    return Says(
        reward=rng.choice([0.0, 0.5, 1.0, None]),
        agent=rng.choice(["a", "b"]),
        trainable=rng.random() < 0.8,
        ok=rng.random() < 0.9,
        branches=rng.randint(1, 3),
        completion_tokens=rng.choice([2, 6, 40]),
        detected={"gibberish": rng.random() < 0.1, "repetition": rng.random() < 0.1},
        versions=rng.choice([None, (start, step)]),
    )


async def play(seed: int, num_events: int) -> None:
    rng = random.Random(seed)
    algorithm = Counting()
    bench = Bench(
        algorithm=algorithm,
        batch_traces=5,
        max_off_policy=2,
        seq_len=rng.choice([5, 20, 64]),
        drop=DropConfig(gibberish=True, zero_advantage=rng.random() < 0.5),
    )
    owed: dict = {}
    shipped: Counter[str] = Counter()
    step = 1
    for _ in range(num_events):
        event = rng.random()
        if event < 0.25 or not owed:
            group = bench.group(rng.choice(["math", "code"]), size=rng.randint(1, 4), version=step - 1)
            owed[group.id] = [group, group.size]
            continue
        group, left = owed[rng.choice(list(owed))]
        if event < 0.75:
            left -= 1
            await bench.arrive(group, *(random_trace(rng, step) for _ in range(rng.randint(1, 2))))
        elif event < 0.8:
            left -= 1
            await bench.fail(group)
        elif event < 0.85:
            await bench.cancel(
                group, left, rng.choice(["stale", "overload", "deadline"]), rng.randint(0, left)
            )
            left = 0
        else:
            batch = bench.sink.cut(step)
            if batch is not None:
                shipped.update(sample.payload.id for sample in batch.samples)
                bench.train(batch)
                assert all(each.oldest is None or step - 1 - each.oldest <= 2 for each in batch.cohort)
                step += 1
        owed[group.id][1] = left
        if not left:
            del owed[group.id]
    await bench.end()
    assert set(algorithm.scored.values()) <= {1}
    assert set(shipped.values()) <= {1}
    assert bench.store.ledger.freed["trainer"] == len(shipped)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_events=st.integers(1, 80))
def test_everything_adds_up_whatever_happens(seed, num_events):
    with contextlib.suppress(ConfigError):  # a run that trains nothing for long enough ends, and should
        asyncio.run(play(seed, num_events))
