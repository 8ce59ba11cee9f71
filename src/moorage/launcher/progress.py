"""What a person sees while a run goes on: a small panel in a terminal, plain lines elsewhere.

It reads the metrics files that the processes write, and nothing else; it never stops a run: when the terminal
or the pipe is closed, it is silent from then on.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from moorage.core.rundir import RunDir
from moorage.core.terminal import reader_may_leave, say

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
RECENT = 8


class MetricsTail:
    """Reads the lines that were added to a metrics file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """New whole lines, parsed."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


@dataclass
class Picture:
    """What is known about a run so far, by step."""

    max_steps: int
    started: float
    step: int = 0
    first_step_at: float | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    orchestrator: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    waiting_for: str = "starting"

    def add_orchestrator(self, line: dict[str, Any]) -> None:
        self.orchestrator = line
        if line.get("reward/mean") is not None:
            self.rewards[line["step"]] = line["reward/mean"]

    def add_trainer(self, line: dict[str, Any]) -> None:
        self.trainer = line
        self.step = max(self.step, line["step"])
        self.step_times = [*self.step_times, line.get("time", time.time())][-RECENT - 1 :]

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last steps."""
        if len(self.step_times) < 2:
            return None
        return (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)

    @property
    def seconds_left(self) -> float | None:
        per_step = self.seconds_per_step
        return None if per_step is None else per_step * (self.max_steps - self.step)


class Display(Protocol):
    """Where a picture goes."""

    def show(self, picture: Picture, new_steps: list[int]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """One line per step."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def show(self, picture: Picture, new_steps: list[int]) -> None:
        for step in new_steps:
            self.say(_line(picture, step))

    def say(self, text: str) -> None:
        say(text, self.out)

    def close(self) -> None:
        pass


class LiveDisplay:
    """A panel that is redrawn in place."""

    def __init__(self, title: str, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.title = title
        self.out = out
        self.console = Console(file=out)
        self.live = Live(console=self.console, refresh_per_second=4, transient=False, auto_refresh=False)
        with reader_may_leave(out):
            self.live.start()

    def show(self, picture: Picture, new_steps: list[int]) -> None:
        del new_steps
        with reader_may_leave(self.out):
            self.live.update(self._panel(picture), refresh=True)

    def _panel(self, picture: Picture) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        bar = ProgressBar(total=picture.max_steps, completed=picture.step, width=CURVE_WIDTH)
        state = f"{picture.step} of {picture.max_steps}"
        table.add_row("step", state if picture.step else f"{state}   {picture.waiting_for}")
        table.add_row("", bar)
        rewards = [picture.rewards[step] for step in sorted(picture.rewards)]
        if rewards:
            table.add_row("reward", f"{rewards[-1]:.3f}  {draw_curve(rewards)}")
        for name, text in _figures(picture):
            table.add_row(name, text)
        return Panel(table, title=f"moorage  {self.title}", title_align="left", expand=False)

    def say(self, text: str) -> None:
        with reader_may_leave(self.out):
            self.live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        with reader_may_leave(self.out):
            self.live.stop()


class Progress:
    """Follows the metrics files of a run and shows them."""

    def __init__(self, run: RunDir, max_steps: int, display: Display) -> None:
        self.display = display
        self.picture = Picture(max_steps, time.time())
        self._orchestrator = MetricsTail(run.metrics("orchestrator"))
        self._trainer = MetricsTail(run.metrics("trainer"))

    def update(self) -> None:
        """Read what is new, and show it."""
        for line in self._orchestrator.read():
            self.picture.add_orchestrator(line)
        new = self._trainer.read()
        for line in new:
            self.picture.add_trainer(line)
        self.display.show(self.picture, [line["step"] for line in new])


def make_display(title: str, out: TextIO | None = None) -> Display:
    """A panel when standard output is a terminal, plain lines otherwise."""
    where: TextIO = sys.stdout if out is None else out
    return LiveDisplay(title, where) if where.isatty() else PlainDisplay(where)


def draw_curve(values: list[float], width: int = CURVE_WIDTH, low: float = 0.0, high: float = 1.0) -> str:
    """`values` as a line of bars; the scale grows beyond 0..1 when they do."""
    low, high = min(low, *values), max(high, *values)
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((value - low) * scale)] for value in values)


def format_seconds(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line(picture: Picture, step: int) -> str:
    reward = picture.rewards.get(step)
    parts = [f"step {step}/{picture.max_steps}"]
    parts.append(f"reward {reward:.3f}" if reward is not None else "reward -")
    return "  ".join([*parts, *(f"{name} {text}" for name, text in _figures(picture))])


def _figures(picture: Picture) -> list[tuple[str, str]]:
    """Name and text of the figures beside the reward; those not known yet are left out."""
    trainer, orchestrator = picture.trainer, picture.orchestrator
    found = [
        ("mismatch", trainer.get("mismatch_kl/mean"), "{:.2e}"),
        ("lag", trainer.get("policy/lag/mean"), "{:.1f}"),
        ("in flight", orchestrator.get("dispatcher/inflight/train"), "{:.0f}"),
        ("tokens/s", trainer.get("perf/throughput"), "{:,.0f}"),
        ("s/step", picture.seconds_per_step, "{:.2f}"),
    ]
    figures = [(name, form.format(value)) for name, value, form in found if value is not None]
    if picture.seconds_left is not None:
        figures.append(("left", format_seconds(picture.seconds_left)))
    return figures
