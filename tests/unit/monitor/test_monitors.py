# ruff: noqa: ARG002 - scripted partners take what the real ones take
from __future__ import annotations

import io
import json
import logging
import math

from moorage.config.base import make_config
from moorage.config.run import MonitorConfig
from moorage.core.rundir import RunDir
from moorage.monitor.console import ConsoleMonitor
from moorage.monitor.fanout import Fanout
from moorage.monitor.files import FileMonitor, read_metrics
from moorage.monitor.setup import make_monitor


class Broken:
    """Fails from the second row on."""

    def __init__(self) -> None:
        self.rows = 0

    def log(self, metrics, step):
        self.rows += 1
        if self.rows > 1:
            raise RuntimeError("disk full")

    def log_samples(self, split, rows, step):
        raise AssertionError("a skipped monitor is not called")

    def close(self):
        raise AssertionError("a skipped monitor is not called")


def test_rows_are_flat_json_lines_with_step_and_time(tmp_path):
    monitor = FileMonitor(tmp_path / "metrics" / "x.jsonl")
    monitor.log({"a/b": 1.5}, 3)
    monitor.close()
    (row,) = read_metrics(tmp_path / "metrics" / "x.jsonl")
    assert (row["step"], row["a/b"]) == (3, 1.5)
    assert row["time"] > 0


def test_a_torn_line_spoils_nothing_that_follows(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a')
    monitor = FileMonitor(path)
    monitor.log({}, 3)
    monitor.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_monitor_that_raises_is_warned_of_once_and_skipped(tmp_path, caplog):
    broken, path = Broken(), tmp_path / "x.jsonl"
    fanout = Fanout([broken, FileMonitor(path)])
    with caplog.at_level(logging.WARNING, logger="moorage"):
        for step in range(4):
            fanout.log({"a": step}, step)
        fanout.log_samples("train", [], 4)
        fanout.close()
    assert len(read_metrics(path)) == 4
    assert broken.rows == 2
    assert [record.message for record in caplog.records if "disk full" in record.message] != []
    assert len(caplog.records) == 1


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    fanout = Fanout([FileMonitor(tmp_path / "x.jsonl")])
    fanout.log({"good": 1.0, "bad": math.nan, "worse": math.inf}, 1)
    fanout.close()
    row = json.loads((tmp_path / "x.jsonl").read_text())
    assert "good" in row
    assert "bad" not in row
    assert "worse" not in row


def test_the_console_shows_what_is_followed_and_eval_headlines():
    stream = io.StringIO()
    console = ConsoleMonitor(stream)
    console.log({"reward/mean": 0.5, "train/x/all/y": 1.0}, 7)
    console.log({"eval/m/avg@4": 0.25, "eval/m/all/agent/avg@4": 0.25}, 7)
    console.log({"other": 1.0}, 8)
    assert stream.getvalue() == "step 7 | reward 0.5\nstep 7 | eval/m/avg@4 0.25\n"


def test_a_process_always_has_files_and_console(tmp_path, capsys):
    monitor = make_monitor(MonitorConfig(), RunDir(tmp_path), "orchestrator", "id")
    monitor.log({"loss": 0.5}, 1)
    monitor.close()
    assert read_metrics(RunDir(tmp_path).metrics("orchestrator"))[0]["loss"] == 0.5
    assert "loss 0.5" in capsys.readouterr().err


def test_wandb_writes_offline_with_a_table_of_samples(tmp_path, caplog):
    config = make_config(MonitorConfig, {"wandb": {"project": "p", "mode": "offline"}})
    row = {"step": 1, "agent": "a", "branch_idx": 0, "reward": 1.0}
    with caplog.at_level(logging.WARNING, logger="moorage"):
        monitor = make_monitor(config, RunDir(tmp_path), "orchestrator", "id")
        for step in (1, 2):
            monitor.log({"loss": 0.5 * step}, step)
            monitor.log_samples(
                "train", [{**row, "step": step}, {**row, "step": step, "branch_idx": 1}], step
            )
        monitor.close()
    assert not caplog.records  # nothing was skipped
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    tables = sorted(run.rglob("*.table.json"), key=lambda path: path.stat().st_size)
    newest = json.loads(tables[-1].read_text())
    assert newest["columns"] == list(row)
    assert newest["data"] == [[step, "a", branch, 1.0] for step in (1, 2) for branch in (0, 1)]
