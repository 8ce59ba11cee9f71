"""The monitors of a process, from its configuration."""

from __future__ import annotations

from moorage.config.run import MonitorConfig
from moorage.core.rundir import RunDir
from moorage.monitor.console import ConsoleMonitor
from moorage.monitor.fanout import Fanout, Monitor
from moorage.monitor.files import FileMonitor


def make_monitor(config: MonitorConfig, run: RunDir, process: str, run_id: str) -> Fanout:
    """JSONL and console always, Weights & Biases when configured. Raises when one cannot be made."""
    monitors: list[Monitor] = [FileMonitor(run.metrics(process)), ConsoleMonitor()]
    if config.wandb is not None:
        from moorage.monitor.wandb import WandbMonitor

        monitors.append(
            WandbMonitor(
                config.wandb, run_name=run.root.name, run_id=run_id, process=process, folder=run.root
            )
        )
    return Fanout(monitors)
