"""A small job with all its real processes, at learning rate 0: trainer and engine must agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.core.rundir import ready_steps
from moorage.records.payload import HOLDERS
from tests.flow.jobs import Job, run_job

STEPS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, dense_model: Path) -> Job:
    folder = tmp_path_factory.mktemp("job")
    spool = folder / "spool"
    shared = ("--orchestrator.sampling.top_k", "40", "--orchestrator.sampling.top_p", "0.9")
    own = ("--orchestrator.train.0.sampling.temperature", "0.8")
    control = ("--trainer.optimizer.lr", "0", "--payload.spool_dir", str(spool))
    return run_job(folder, dense_model, *shared, *own, *control, max_steps=STEPS)


def test_trainer_and_engine_agree_on_every_log_probability(job: Job) -> None:
    lines = job.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["mismatch_kl/max"] < 1e-6
        assert line["payload/dropped_micro_batches"] == 0


def test_what_a_source_sets_joins_the_shared_sampling_in_every_call(job: Job) -> None:
    files = sorted(job.run.root.glob("episodes/step_*/train/all/traces.jsonl"))
    calls = [
        call["sampling"]
        for path in files
        for line in path.read_text().splitlines()
        for trace in json.loads(line)["traces"]
        for call in trace["calls"]
    ]
    wanted = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 8}
    assert len(calls) >= 8 * STEPS
    assert all({name: call.get(name) for name in wanted} == wanted for call in calls), calls[:2]


def test_the_summary_has_every_field_with_measured_values(job: Job) -> None:
    summary = job.summary()
    assert (summary["status"], summary["error"], summary["steps"]) == ("finished", None, STEPS)
    assert len(summary["reward"]) == STEPS
    assert summary["reward"][0] is not None
    assert len(summary["mismatch_kl"]) == len(summary["lag"]) == STEPS
    assert summary["wall_s"] > summary["step_s"] > 0
    assert set(summary["peak_rss_mib"]) == {"launcher", "inference", "env_server", "orchestrator", "trainer"}
    assert all(mib > 20 for mib in summary["peak_rss_mib"].values())
    assert summary["spool_peak_mib"] > 0
    assert summary["eval"] == {}
    episodes = summary["episodes"]
    assert episodes["started"] >= episodes["trained"] >= STEPS * 8 - 8
    assert episodes["errored"] == 0
    assert isinstance(episodes["dropped"], dict)
    assert isinstance(episodes["cancelled"], int)


def test_every_payload_was_freed_once(job: Job) -> None:
    payload = job.summary()["payload"]
    assert set(payload["freed"]) == set(HOLDERS)
    assert payload["kept"] == sum(payload["freed"].values()) > 0
    assert payload["bytes"] > 0
    assert payload["outstanding"] == payload["double_frees"] == payload["unknown"] == 0
    assert payload["dropped_micro_batches"] == 0
    assert payload["freed"]["trainer"] >= STEPS * 8 - 8


def test_nothing_is_left_running_or_lying_about(job: Job) -> None:
    assert job.processes() == []
    assert [path for path in (job.run.root.parents[1] / "spool").rglob("*") if path.is_file()] == []
    assert not list(job.run.envs.rglob("*.address"))
    assert json.loads(job.run.end.read_text())["status"] == "finished"


def test_the_run_folder_has_what_people_look_for(job: Job) -> None:
    run = job.run
    assert run.run_toml.exists()
    assert (run.configs / "trainer.json").exists()
    for name in ("inference", "orchestrator", "trainer"):
        assert run.log(name).exists()
    assert list((run.logs / "envs" / "train").glob("reverse_text.*.log"))
    assert STEPS in ready_steps(run.weights)
    for line in run.traces(1, "train", "all").read_text().splitlines():
        assert json.loads(line)["traces"]


def test_a_finished_run_is_not_started_over(job: Job, dense_model: Path) -> None:
    from tests.flow.jobs import start_job

    again = start_job(job.run.root.parents[1], dense_model)
    code, _, err = again.finish(60.0)
    assert code == 2
    assert "holds a run already" in err


def test_the_ledger_of_an_ended_run_is_settled(job: Job) -> None:
    command = [sys.executable, "-m", "moorage.cli.main", "ledger", str(job.run.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(job.summary()["payload"]["kept"]) in done.stdout
