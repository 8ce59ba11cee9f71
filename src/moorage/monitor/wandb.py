"""Weights & Biases: all series, and sample tables with one row per branch (R20).

Imported only when it is configured. `mode = "offline"` writes to the run folder and needs no account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moorage.config.run import WandbConfig
from moorage.core.errors import ConfigError


class WandbMonitor:
    """One wandb run per process: the orchestrator's and the trainer's share a group, named after the run."""

    def __init__(
        self, config: WandbConfig, *, run_name: str, run_id: str, process: str, folder: Path
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                "monitor.wandb is set, but wandb is not installed: pip install 'moorage[wandb]'"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        name = config.name or run_name
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project,
            name=f"{name}/{process}",
            group=name,
            id=f"{run_id}-{process}".replace("/", "-"),
            resume="allow",
            mode=config.mode,
            dir=str(folder),
        )
        self._run.define_metric("*", step_metric="step")  # all charts run over the training step
        self._rows: dict[str, list[list[Any]]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, split: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Append rows to the table of `split`. All rows have the same keys."""
        if not rows:
            return
        known = self._rows.setdefault(split, [])
        known += [[row[column] for column in rows[0]] for row in rows]
        table = self._wandb.Table(columns=list(rows[0]), data=known)
        self._run.log({f"samples/{split}": table, "step": step})

    def close(self) -> None:
        self._run.finish()
