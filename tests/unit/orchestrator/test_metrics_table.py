"""The metrics of a scripted step and of a scripted measurement, against tables computed by hand.

The step (trained version 3, batch of 3 traces, repetition drops). Every trace: 4 prompt and 6 completion
tokens per branch, 2 s of agent time, 1.5 of it in the model.

    group A   e1  solver reward 1, three branches, versions 1-2, exact 1      judge (untrained) reward 0.5
              e2  solver reward 0, versions 0-2, stopped by max_turns         judge reward 0.5
    group B   e3  solver reward 1, versions 2-2, repetition: filtered
    (3, one   e4  solver reward 0, versions 2-3, 16 completion tokens
    cancelled)
    group C   e5  the task raised: no trace

Shipped: e1, e2, e4 (five samples). Sums per episode (total, input, output, turns, branches):
e1 40 16 24 4 4, e2 20 8 12 2 2, e3 10 4 6 1 1, e4 20 4 16 1 1.
"""

from __future__ import annotations

import asyncio

import pytest

from moorage.config.env import SamplingConfig
from moorage.config.orchestrator import DropConfig
from moorage.orchestrator.eval_sink import score_pass
from moorage.orchestrator.events import failed_episode
from moorage.orchestrator.facts import read_episode
from moorage.orchestrator.progress import Progress
from moorage.orchestrator.sources import EvalPass, Source
from moorage.orchestrator.step_metrics import advance, step_metrics, window_sizes
from tests.unit.orchestrator.scripted import Says, make_episode, make_task
from tests.unit.orchestrator.sinking import Bench


def dist(name: str, mean: float, high: float, low: float, p10: float, p90: float) -> dict[str, float]:
    return {
        f"{name}/mean": mean,
        f"{name}/max": high,
        f"{name}/min": low,
        f"{name}/p10": p10,
        f"{name}/p90": p90,
    }


def flat(name: str, value: float) -> dict[str, float]:
    return dist(name, value, value, value, value, value)


def seconds(name: str) -> dict[str, float]:
    stages = {
        "agent": 2,
        "agent/model": 1.5,
        "agent/harness": 0.5,
        "total": 2,
        "setup": 0,
        "finalize": 0,
        "scoring": 0,
    }
    return {
        key: value for stage, s in stages.items() for key, value in flat(f"{name}/timing/{stage}", s).items()
    }


def scope_table(scope: str) -> dict[str, float]:
    every, solver, judge = f"{scope}/all", f"{scope}/all/solver", f"{scope}/all/judge"
    shipped, trained = f"{scope}/effective", f"{scope}/effective/solver"
    return {
        # four episodes with traces: 10 20 20 40, 4 4 8 16, 6 12 16 24, 1 1 2 4
        **dist(f"{every}/num_total_tokens", 22.5, 40, 10, 13, 34),
        **dist(f"{every}/num_input_tokens", 8, 16, 4, 4, 13.6),
        **dist(f"{every}/num_output_tokens", 14.5, 24, 6, 7.8, 21.6),
        **dist(f"{every}/num_turns", 2, 4, 1, 1, 3.4),
        **dist(f"{every}/num_branches", 2, 4, 1, 1, 3.4),
        # of six episodes one failed and one was cancelled
        f"{every}/has_error/mean": 1 / 6,
        f"{every}/cancelled/mean": 1 / 6,
        # solver: 30 10 10 20 tokens; 12 4 4 4 in; 18 6 6 16 out; 3 1 1 1 turns and branches
        **dist(f"{solver}/reward", 0.5, 1, 0, 0, 1),
        **dist(f"{solver}/num_total_tokens", 17.5, 30, 10, 10, 27),
        **dist(f"{solver}/num_input_tokens", 6, 12, 4, 4, 9.6),
        **dist(f"{solver}/num_output_tokens", 11.5, 18, 6, 6, 17.4),
        **dist(f"{solver}/num_turns", 1.5, 3, 1, 1, 2.4),
        **dist(f"{solver}/num_branches", 1.5, 3, 1, 1, 2.4),
        **seconds(solver),
        **flat(f"{solver}/metrics/exact", 1),
        **dist(f"{solver}/rewards/score", 0.5, 1, 0, 0, 1),
        f"{solver}/is_truncated/mean": 0.25,
        f"{solver}/is_completed/mean": 1,
        f"{solver}/unscored/mean": 0,
        f"{solver}/stop_condition/generation_truncated": 0.25,
        f"{solver}/stop_condition/agent_completed": 0.75,
        f"{solver}/stop_condition/max_turns": 0.25,
        f"{solver}/has_error/mean": 0,
        f"{solver}/detected/repetition/mean": 0.25,
        f"{solver}/detected/gibberish/mean": 0,
        f"{solver}/solved_none": 0,
        f"{solver}/solved_all": 0,
        f"{solver}/solved_some": 1,
        f"{solver}/is_trainable/mean": 1,
        f"{solver}/is_admitted/mean": 0.75,
        # judge: two equal traces, neither trained
        **flat(f"{judge}/reward", 0.5),
        **flat(f"{judge}/num_total_tokens", 10),
        **flat(f"{judge}/num_input_tokens", 4),
        **flat(f"{judge}/num_output_tokens", 6),
        **flat(f"{judge}/num_turns", 1),
        **flat(f"{judge}/num_branches", 1),
        **seconds(judge),
        **flat(f"{judge}/rewards/score", 0.5),
        f"{judge}/is_truncated/mean": 0,
        f"{judge}/is_completed/mean": 1,
        f"{judge}/unscored/mean": 0,
        f"{judge}/stop_condition/generation_truncated": 0,
        f"{judge}/stop_condition/agent_completed": 1,
        f"{judge}/has_error/mean": 0,
        f"{judge}/solved_none": 0,
        f"{judge}/solved_all": 0,
        f"{judge}/solved_some": 1,
        f"{judge}/is_trainable/mean": 0,
        f"{judge}/is_admitted/mean": 0,
        # shipped: the solver's traces of e1, e2, e4, and nothing of the judge
        **dist(f"{shipped}/num_total_tokens", 20, 30, 10, 12, 28),
        **dist(f"{shipped}/num_input_tokens", 20 / 3, 12, 4, 4, 10.4),
        **dist(f"{shipped}/num_output_tokens", 40 / 3, 18, 6, 8, 17.6),
        **dist(f"{shipped}/num_turns", 5 / 3, 3, 1, 1, 2.6),
        **dist(f"{shipped}/num_branches", 5 / 3, 3, 1, 1, 2.6),
        **dist(f"{trained}/reward", 1 / 3, 1, 0, 0, 0.8),
        **dist(f"{trained}/num_total_tokens", 20, 30, 10, 12, 28),
        **dist(f"{trained}/num_input_tokens", 20 / 3, 12, 4, 4, 10.4),
        **dist(f"{trained}/num_output_tokens", 40 / 3, 18, 6, 8, 17.6),
        **dist(f"{trained}/num_turns", 5 / 3, 3, 1, 1, 2.6),
        **dist(f"{trained}/num_branches", 5 / 3, 3, 1, 1, 2.6),
        **seconds(trained),
        **flat(f"{trained}/metrics/exact", 1),
        **dist(f"{trained}/rewards/score", 1 / 3, 1, 0, 0, 0.8),
        f"{trained}/is_truncated/mean": 1 / 3,
        f"{trained}/is_completed/mean": 1,
        f"{trained}/unscored/mean": 0,
        f"{trained}/stop_condition/generation_truncated": 1 / 3,
        f"{trained}/stop_condition/agent_completed": 2 / 3,
        f"{trained}/stop_condition/max_turns": 1 / 3,
        f"{trained}/is_trainable/mean": 1,
        f"{trained}/is_admitted/mean": 1,
    }


STEP_TABLE = {
    "reward/mean": 0.5,
    **scope_table("train/agg"),
    **scope_table("train/math"),
    # four survivors (solver of e1 to e4): one is dropped, for one reason
    "dropped/all/rate": 0.25,
    "dropped/all/repetition/rate": 0.25,
    **{
        f"dropped/all/{name}/rate": 0
        for name in (
            "stale",
            "gibberish",
            "unscored",
            "untrainable",
            "unassigned",
            "truncated",
            "zero_advantage",
            "shutdown",
        )
    },
    "groups/lone_survivor": 0,
    # e1: 2 behind (1 while generated), e2: 3 (2), e4: 1 (1)
    "off_policy/mean": 2,
    "off_policy/max": 3,
    "off_policy/in_flight/mean": 4 / 3,
    "off_policy/in_flight/max": 2,
    "off_policy/in_queue/mean": 2 / 3,
    "off_policy/in_queue/max": 1,
    "off_policy/dropped": 0,
    "batch/math": 1,
    "batch/code": 0,
    "batch/traces": 3,
    "batch/samples": 5,
    "batch/tokens": 3 * 10 + 10 + 20,
    "batch/cut": 0,
    "batch/zero_advantage_tokens": 0,
    "progress/tokens": 90,
    "progress/input_tokens": 32,
    "progress/output_tokens": 58,
    "progress/rollouts": 5,
    "progress/tasks": 3,
    "progress/total_tokens": 1090,
    "progress/total_rollouts": 15,
    "progress/total_tasks": 8,
}


async def scripted_step() -> dict[str, float]:
    bench = Bench(batch_traces=3, drop=DropConfig(repetition=True))
    judge = Says(agent="judge", trainable=False, reward=0.5)
    a = bench.group()
    e1 = Says(agent="solver", reward=1.0, branches=3, versions=(1, 2), metrics={"exact": 1.0})
    await bench.arrive(a, e1, judge)
    await bench.arrive(a, Says(agent="solver", reward=0.0, versions=(0, 2), stop="max_turns"), judge)
    b = bench.group(size=3)
    found = {"repetition": True, "gibberish": False}
    await bench.arrive(b, Says(agent="solver", reward=1.0, versions=(2, 2), detected=found))
    await bench.arrive(b, Says(agent="solver", reward=0.0, versions=(2, 3), completion_tokens=16))
    await bench.cancel(b, 1, "overload")
    await bench.fail(bench.group(size=1))
    batch = bench.sink.cut(4)
    progress = Progress(step=4, total_tokens=1000, total_rollouts=10, total_tasks=5)
    sizes = window_sizes(batch.window)
    advance(progress, sizes)
    bench.train(batch)
    values = step_metrics(batch, sizes, progress, ["math", "code"])
    await bench.end()
    return values


def test_a_step_equals_the_table():
    values = asyncio.run(scripted_step())
    assert sorted(values) == sorted(STEP_TABLE)
    assert values == pytest.approx(STEP_TABLE)


def test_a_measurement_equals_the_table():
    """Three tasks, two episodes each: 1 1, 1 0, 0 and a task that raised."""
    source = Source("m", "eval", 2, SamplingConfig(), 10.0)
    rewards = [("g0", 1.0), ("g0", 1.0), ("g1", 1.0), ("g1", 0.0), ("g2", 0.0)]
    episodes = [
        read_episode(
            make_episode([Says(reward=reward)], make_task(0), None), env="m", group_id=group, span=(4, 5)
        )
        for group, reward in rewards
    ]
    episodes.append(
        read_episode(failed_episode(make_task(2), "m", "task_error", "no"), env="m", group_id="g2")
    )
    values = score_pass(EvalPass(source, 4, 3), episodes)
    agent = {
        name.removeprefix("eval/m/effective/agent/"): value
        for name, value in values.items()
        if "effective/agent" in name
    }
    assert agent["avg@2"] == pytest.approx(3 / 5)
    # k=1 over three groups: (1 + 1/2 + 0) / 3; k=2 over the two whole ones: any (1 + 1) / 2, all (1 + 0) / 2
    assert (agent["pass@1"], agent["pass^1"]) == pytest.approx((0.5, 0.5))
    assert (agent["pass@2"], agent["pass^2"]) == pytest.approx((1.0, 0.5))
    assert "eval/m/all/agent/pass@1" not in values
    expected = {
        "eval/m/avg@2": 3 / 5,
        "eval/m/pass@2": 1.0,
        "eval/m/policy_version": 4,
        "eval/m/num_episodes": 6,
        "eval/m/num_scored": 5,
        "eval/m/num_errored": 1,
        "eval/m/num_cancelled": 0,
        "eval/m/drift/max": 1,
        "eval/m/all/has_error/mean": 1 / 6,
        "eval/m/all/agent/has_error/mean": 0.0,
        "eval/m/all/agent/solved_all": 1 / 3,
        "eval/m/all/agent/solved_none": 1 / 3,
        "eval/m/all/agent/solved_some": 1 / 3,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_rewards_between_zero_and_one_have_no_pass_rates():
    source = Source("m", "eval", 1, SamplingConfig(), 10.0)
    facts = read_episode(make_episode([Says(reward=0.5)], make_task(0), None), env="m", group_id="g")
    values = score_pass(EvalPass(source, 0, 1), [facts])
    assert values["eval/m/avg@1"] == 0.5
    assert not any("pass" in name for name in values)


def test_a_measurement_of_which_nothing_was_scored_warns(caplog):
    source = Source("m", "eval", 1, SamplingConfig(), 10.0)
    facts = read_episode(failed_episode(make_task(0), "m", "task_error", "no"), env="m", group_id="g")
    values = score_pass(EvalPass(source, 0, 1), [facts])
    assert "nothing was scored" in caplog.text
    assert "eval/m/avg@1" not in values
