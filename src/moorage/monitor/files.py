"""`metrics/<process>.jsonl`: one object per line, with step, time and flat names. Always written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moorage.core.rundir import write_bytes_atomic


class FileMonitor:
    """Appends rows; each is flushed, so a killed process loses none. A torn last line of an earlier attempt
    is ended first, so that it does not spoil the next row."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        size = self._file.seek(0, 2)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.write(_encode({"step": step, "time": time.time(), **metrics}))
        self._file.flush()

    def log_samples(self, split: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Samples are in `episodes/` already."""

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, torn lines left out; empty when there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def keep_rows(path: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leave only the rows of a metrics file that are `wanted`. Nobody may have it open for writing: what is
    written to the old file is lost."""
    rows = read_metrics(path)
    kept = [row for row in rows if wanted(row)]
    if len(kept) < len(rows):
        write_bytes_atomic(path, b"".join(map(_encode, kept)))


def _encode(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
