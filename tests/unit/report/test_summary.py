"""summary.json from metrics files and a launcher's facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moorage.core.rundir import RunDir
from moorage.launcher.resume import clean_after
from moorage.monitor.files import FileMonitor
from moorage.records.payload import HOLDERS, Ledger
from moorage.report.summary import Facts, by_step, make_summary, render_summary, sum_ledgers


def write_lines(run: RunDir, name: str, lines: list[dict[str, Any]], tail: str = "") -> None:
    path = run.metrics(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def make_run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    orchestrator = [
        {"step": 1, "time": 1.0, "reward/mean": 0.25, "eval/words/reward/mean": 0.5, "episodes/started": 10},
        {"step": 2, "time": 2.0, "episodes/started": 20, "episodes/trained": 16, "episodes/errored": 1,
         "episodes/cancelled": 2, "episodes/dropped/stale": 1, "episodes/dropped/zero_advantage": 0},
        {"step": 3, "time": 3.0, "reward/mean": 0.75, "episodes/started": 30},
    ]  # fmt: skip
    trainer = [
        {"step": step, "time": step, "time/step": step / 10, "mismatch_kl/mean": 0.1 * step,
         "policy/lag/mean": 1.0, "payload/dropped_micro_batches": 1 if step == 2 else 0}
        for step in (1, 2, 3)
    ]  # fmt: skip
    write_lines(run, "orchestrator", orchestrator)
    write_lines(run, "trainer", trainer, tail='{"step": 4, "ti')
    return run


def ledger() -> Ledger:
    freed = {**dict.fromkeys(HOLDERS, 0), "trainer": 16, "train_sink": 4}
    return Ledger(kept=20, kept_bytes=2000, freed=freed, peak_bytes=2**20)


def test_every_figure_comes_from_where_it_was_measured(tmp_path: Path) -> None:
    facts = Facts("finished", None, 12.3456, {"a": ledger(), "b": ledger()}, {"trainer": 100.04})
    summary = make_summary(make_run(tmp_path), facts)
    assert summary["reward"] == [0.25, None, 0.75], "no episode arrived in the window of step 2"
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.5)
    assert (summary["steps"], summary["wall_s"], summary["step_s"]) == (3, 12.346, 0.2)
    assert summary["eval"] == {"words": {"1": {"reward/mean": 0.5}}}
    assert summary["episodes"] == {
        "started": 30, "trained": 16, "errored": 1, "cancelled": 2,
        "dropped": {"stale": 1, "zero_advantage": 0},
    }  # fmt: skip
    payload = summary["payload"]
    assert (payload["kept"], payload["bytes"], payload["dropped_micro_batches"]) == (40, 4000, 1)
    assert payload["freed"]["trainer"] == 32
    assert summary["spool_peak_mib"] == 2.0
    assert summary["peak_rss_mib"] == {"trainer": 100.0}
    assert [round(value, 3) for value in summary["mismatch_kl"]] == [0.1, 0.2, 0.3]


def test_a_server_that_did_not_answer_makes_the_account_unknown(tmp_path: Path) -> None:
    summary = make_summary(make_run(tmp_path), Facts("failed", "x", 1.0, {"a": ledger(), "b": None}))
    assert summary["payload"] is None
    assert summary["spool_peak_mib"] is None
    assert "unknown" in render_summary(summary)
    assert sum_ledgers({}) is None


def test_a_run_that_never_began_has_every_field_too(tmp_path: Path) -> None:
    empty = make_summary(RunDir(tmp_path / "none"), Facts("failed", "no model"))
    full = make_summary(make_run(tmp_path), Facts("finished", None, 1.0, {"a": ledger()}))
    assert empty.keys() == full.keys()
    assert empty["reward"] == []
    assert render_summary(empty)
    assert "20 kept, 20 freed, 0 outstanding" in render_summary(full)


def test_after_a_resume_only_what_counts_is_shown(tmp_path: Path) -> None:
    """The first attempt came to step 15, the second went on after 10 and ended in step 12."""
    run = RunDir(tmp_path)

    def write_attempt(first: int, last: int, reward: float) -> None:
        for process, steps in (("trainer", range(first, last + 1)), ("orchestrator", range(first, last + 2))):
            monitor = FileMonitor(run.metrics(process))
            for step in steps:
                monitor.log({"reward/mean": reward, "episodes/started": 10 * step, "time/step": 1.0}, step)
            monitor.close()

    write_attempt(1, 15, 0.25)
    assert make_summary(run, Facts("failed"))["steps"] == 15
    clean_after(run, 10, keep_batches=False)
    write_attempt(11, 11, 0.75)
    summary = make_summary(run, Facts("failed"))
    assert summary["steps"] == 11
    assert summary["reward"] == [*[0.25] * 10, 0.75]
    assert summary["reward_last"] == pytest.approx((0.25 + 0.75 + 0.75) / 3)
    assert summary["episodes"]["started"] == 120


def test_rows_of_a_step_count_as_one_and_the_last_writer_wins() -> None:
    rows = [{"step": 2, "a": 2}, {"step": 1, "a": 1}, {"step": 2, "a": 5}, {"step": 3, "b": 1}]
    assert by_step(rows) == {
        1: {"step": 1, "a": 1},
        2: {"step": 2, "a": 5},
        3: {"step": 3, "b": 1},
    }
