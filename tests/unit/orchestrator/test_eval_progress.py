from __future__ import annotations

import io

from moorage.orchestrator.eval_progress import Progress, render_progress
from moorage.orchestrator.results import render_results


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_left_follows_from_what_this_start_has_done():
    assert render_progress(30, 100, 4, new=10, elapsed_s=5.0) == (
        "30/100 episodes  4 running  2/s  0:35 left"
    )
    assert render_progress(20, 100, 4, new=0, elapsed_s=5.0) == "20/100 episodes  4 running"
    assert render_progress(100, 100, 0, new=80, elapsed_s=5.0) == "100/100 episodes  0 running"


def test_a_terminal_has_one_line_and_a_file_has_a_last_line():
    for out, expected in (
        (io.StringIO(), "3/3 episodes  0 running\n"),
        (Terminal(), "\r3/3 episodes  0 running\n"),
    ):
        progress = Progress(3, lambda: (3, 0), out)
        progress.close()
        assert out.getvalue() == expected


def test_the_table_is_aligned():
    row = {"avg@2": 0.5, "num_episodes": 300.0, "all/agent/avg@2": 1.0}
    assert render_results({"letters": row, "m": {"num_episodes": 8.0}}).splitlines() == [
        "source    avg@2  episodes",
        "-------  ------  --------",
        "letters  0.5000       300",
        "m                       8",
    ]
