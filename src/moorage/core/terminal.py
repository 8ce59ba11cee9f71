"""Output for a person who may have left: the terminal was closed, or the reader of the pipe has ended.

Promise: that ends no process. From the first failed write on, what is written goes nowhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def reader_may_leave(out: TextIO) -> Iterator[None]:
    """For a block that writes to `out`: when a write fails, the rest of it and all later output are lost."""
    try:
        yield
    except OSError:
        mute(out)


def mute(out: TextIO) -> None:
    """Let everything that is written to `out` from now on, what it has buffered included, go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, or that is closed
        os.dup2(null, out.fileno())
    os.close(null)


def say(text: str, out: TextIO) -> None:
    """Print `text` and a line end, if anybody still reads."""
    with reader_may_leave(out):
        print(text, file=out, flush=True)
