"""What is shown of a run."""

from __future__ import annotations

import io
import json
import os
import pty
import select
from pathlib import Path

import pytest

from moorage.core.rundir import RunDir
from moorage.launcher.progress import (
    LiveDisplay,
    MetricsTail,
    PlainDisplay,
    Progress,
    draw_curve,
    format_seconds,
    make_display,
)


def write(run: RunDir, name: str, text: str) -> None:
    path = run.metrics(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tail = MetricsTail(run.metrics("trainer"))
    assert tail.read() == []
    write(run, "trainer", '{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    write(run, "trainer", 'ep": 2}\n')
    assert tail.read() == [{"step": 2}]


def test_lines_of_an_earlier_attempt_are_not_shown_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, "trainer", '{"step": 1}\n')
    assert MetricsTail(run.metrics("trainer")).read() == []


def test_one_plain_line_per_step(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    progress = Progress(run, 10, PlainDisplay(out))
    for step in (1, 2, 3):
        write(
            run,
            "orchestrator",
            json.dumps({"step": step, "reward/mean": step / 4, "dispatcher/inflight/train": 7}) + "\n",
        )
        write(
            run, "trainer", json.dumps({"step": step, "time": 2.0 * step, "perf/throughput": 1234.5}) + "\n"
        )
        progress.update()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/10  reward 0.250")
    assert lines[2] == "step 3/10  reward 0.750  in flight 7  tokens/s 1,234  s/step 2.00  left 0:14"


def test_a_terminal_gets_a_panel(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal, open(leader, "rb", buffering=0) as seen:
        assert isinstance(make_display("x", io.StringIO()), PlainDisplay)
        assert terminal.isatty()
        run = RunDir(tmp_path)
        display = make_display("job", terminal)
        assert isinstance(display, LiveDisplay)
        progress = Progress(run, 4, display)
        write(run, "orchestrator", '{"step": 1, "reward/mean": 0.5}\n')
        write(run, "trainer", '{"step": 1, "time": 1.0, "perf/throughput": 10}\n')
        progress.update()
        display.say("a message")
        display.close()
        drawn = b""
        while select.select([seen], [], [], 0.5)[0]:  # one read gives what has come through so far
            drawn += seen.read(65536)
    text = drawn.decode()
    for words in ("moorage  job", "1 of 4", "0.500", "tokens/s", "a message"):
        assert words in text


def test_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        run, display = RunDir(tmp_path), make_display("job", terminal)
        progress = Progress(run, 4, display)
        display.say("somebody reads this")
        os.close(leader)
        write(run, "trainer", '{"step": 1, "time": 1.0}\n')
        progress.update()
        display.say("nobody reads this")
        display.close()
    assert progress.picture.step == 1


def test_a_closed_pipe_stops_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        run = RunDir(tmp_path)
        progress = Progress(run, 4, make_display("job", out))
        write(run, "trainer", '{"step": 1, "time": 1.0}\n')
        progress.update()
        progress.display.say("nobody reads this")
        progress.display.close()
    assert progress.picture.step == 1


@pytest.mark.parametrize(
    ("values", "curve"), [([0.0, 0.5, 1.0], "▁▅█"), ([1.0], "█"), ([0.0, 2.0], "▁█"), ([-1.0, 1.0], "▁█")]
)
def test_a_curve_of_bars(values: list[float], curve: str) -> None:
    assert draw_curve(values) == curve


def test_a_long_curve_is_squeezed() -> None:
    assert len(draw_curve([i / 1000 for i in range(1000)], width=40)) == 40


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.4, "1:05"), (3661, "1:01:01")])
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
