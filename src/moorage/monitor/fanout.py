"""Where metrics go: every monitor gets every row; one that fails is warned of once and skipped (R20).

A monitor is anything with `log(metrics, step)` and `close()`; `log_samples(rows, step)` is optional. A
configured monitor that cannot be made is an error at start; one that fails later never stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moorage.core.log import get_logger
from moorage.core.metrics import finite

log = get_logger(__name__)


class Monitor(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, split: str, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """All monitors of one process."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)
        self._failed: set[int] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row. Values that are not finite are left out."""
        self._each("log", finite(metrics), step)

    def log_samples(self, split: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Rows of a sample table, for monitors that show one."""
        self._each("log_samples", split, rows, step)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for at, monitor in enumerate(self._monitors):
            if at in self._failed:
                continue
            try:
                getattr(monitor, method)(*args)
            except Exception as error:  # noqa: BLE001 whatever it raises, the run goes on
                self._failed.add(at)
                name = type(monitor).__name__
                log.warning("monitor %s failed in %s and is skipped from now on: %r", name, method, error)
