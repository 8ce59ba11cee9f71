# ruff: noqa: ASYNC110 - scripted partners take what the real ones take
"""`moorage eval` over scripted env servers: interrupted and started again it runs what is missing."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from verifiers.v1 import WireTrace
from verifiers.v1.utils.trace_store import read_episodes

from moorage.config.base import make_config
from moorage.config.evaluation import EvaluationConfig
from moorage.core.errors import ConfigError, EnvServerError
from moorage.core.rundir import RunDir
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.evaluation import Evaluation, as_orchestrator, claim_folder
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.sources import resolve_eval
from tests.unit.orchestrator.scripted import Says, ScriptedEngines, ScriptedEnv, ScriptedStore, make_episode


def make_eval_config(root, **settings) -> EvaluationConfig:
    data = {
        "name": "e",
        "output_dir": str(root),
        "model": {"path": "x"},
        "endpoint": "http://engine",
        "sources": [{"name": "m", "env": {"taskset": {"id": "x"}}, "num_tasks": 20}],
        "group_size": 3,
        "max_inflight": 8,
    }
    return make_config(EvaluationConfig, {**data, **settings})


def by_task(store: ScriptedStore, seconds: float = 0.0):
    """Rewards that depend on the task alone; every 20th run is lost to infrastructure."""

    async def behave(call, nth):
        await asyncio.sleep(seconds)
        if nth % 20 == 0:
            raise EnvServerError("worker_died", "scripted")
        index = call.task["data"]["idx"]
        return make_episode([Says(reward=float(random.Random(index).random() < 0.5))], call.task, store)

    return behave


def measure(root, stop_after: int | None = None, scores_groups: bool = False, seconds: float = 0.0):
    """One invocation; `stop_after` so many episodes it is interrupted."""

    async def scenario():
        store = ScriptedStore()
        env = ScriptedEnv(store, by_task(store, seconds))
        config = make_eval_config(root)
        run = RunDir(root / "e")
        claim_folder(run, config)
        (source,) = resolve_eval(as_orchestrator(config))
        environments = {"m": Environment(source, env, scores_groups)}
        evaluation = Evaluation(config, run, environments, {"m": 20}, ScriptedEngines(), Holdings(store))
        stop = asyncio.Event()

        async def interrupt():
            while evaluation.num_done < (stop_after or 10**9):
                await asyncio.sleep(0.001)
            stop.set()

        interrupting = asyncio.create_task(interrupt())
        async with asyncio.timeout(60):
            done = await evaluation.run(stop)
        interrupting.cancel()
        store.assert_clean()
        return done, env

    return asyncio.run(scenario())


@pytest.mark.parametrize("scores_groups", [False, True])
def test_an_interrupted_measurement_runs_only_what_is_missing_and_ends_with_the_same_table(
    tmp_path, capsys, scores_groups
):
    done, _ = measure(tmp_path / "whole", scores_groups=scores_groups)
    assert done
    whole = capsys.readouterr().out
    done, _ = measure(tmp_path / "halves", stop_after=25, scores_groups=scores_groups, seconds=0.005)
    assert not done
    there = len(read_episodes(tmp_path / "halves/e/episodes/step_0/eval/all", WireTrace))
    assert 25 <= there < 60
    capsys.readouterr()
    done, env = measure(tmp_path / "halves", scores_groups=scores_groups)
    assert done
    assert capsys.readouterr().out == whole
    per_run = 3 if scores_groups else 1
    lost = env.num_runs // 20
    assert (env.num_runs - lost) * per_run == 60 - there
    results = [
        json.loads((tmp_path / name / "e/results.json").read_text())["m"] for name in ("whole", "halves")
    ]
    first, second = ({k: v for k, v in each.items() if "timing" not in k} for each in results)
    assert first == second
    assert results[0]["num_episodes"] == 60


def test_a_finished_measurement_only_prints_its_table(tmp_path, capsys):
    measure(tmp_path)
    first = capsys.readouterr().out
    done, env = measure(tmp_path)
    assert done
    assert env.num_runs == 0
    assert capsys.readouterr().out == first
    assert "avg@3" in first


def test_a_torn_line_and_lost_episodes_are_run_again(tmp_path):
    measure(tmp_path)
    path = tmp_path / "e/episodes/step_0/eval/all/traces.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[1])
    lost |= {"ok": False, "traces": [], "errors": [{"type": "worker_died", "message": "x"}]}
    path.write_bytes(b"".join([json.dumps(lost).encode() + b"\n", *lines[2:], lines[0][:50]]))
    done, env = measure(tmp_path)
    assert done
    assert env.num_runs == 2
    assert len(read_episodes(path.parent, WireTrace)) == 60


def test_another_question_in_the_same_folder_is_refused(tmp_path):
    run = RunDir(tmp_path / "e")
    claim_folder(run, make_eval_config(tmp_path))
    claim_folder(run, make_eval_config(tmp_path, max_inflight=4))
    with pytest.raises(ConfigError, match=r"other settings \(group_size\)"):
        claim_folder(run, make_eval_config(tmp_path, group_size=2))
