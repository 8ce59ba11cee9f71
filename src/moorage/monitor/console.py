"""One line per row on standard error, with the few series that a person follows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

FOLLOWED = (
    ("reward/mean", "reward"),
    ("loss", "loss"),
    ("mismatch_kl/mean", "mismatch kl"),
    ("policy/version", "version"),
    ("off_policy/mean", "off policy"),
    ("perf/throughput", "tokens/s"),
    ("dispatcher/inflight/train", "in flight"),
    ("payload/outstanding", "payloads"),
    ("time/step", "seconds"),
)


class ConsoleMonitor:
    """Prints `step N | reward 0.512 | ...`; rows without a followed series print nothing but eval results."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        shown = [f"{label} {metrics[name]:.4g}" for name, label in FOLLOWED if name in metrics]
        shown += [f"{name} {value:.4g}" for name, value in metrics.items() if _is_headline(name)]
        if shown:
            print(f"step {step} | {' | '.join(shown)}", file=self._stream, flush=True)

    def log_samples(self, split: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Tables are not for a terminal."""

    def close(self) -> None:
        """Nothing is open."""


def _is_headline(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == "eval" and parts[2].startswith(("avg@", "pass@", "pass^"))
