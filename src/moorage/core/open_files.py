"""How many files a process may have open."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> int | None:
    """Allow this process as many open files as the system does; how many that is, None: any number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return None if soft == resource.RLIM_INFINITY else soft
