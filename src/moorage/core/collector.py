"""How often Python's cyclic garbage collector runs in our processes.

Importing torch or verifiers makes a million objects that stay for good, and by default the collector walks
them again every few hundred new ones: a tenth of the CPU of a start. Promises: collection stays on in every
process; what is loaded by the end of the start is not walked again. Does not know what a process loads.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000
"""New container objects between two collections of the young: some megabytes of garbage at most."""


def relax_collector() -> None:
    """Collect more rarely than Python does. Call it before the costly imports."""
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)


def settle_collector() -> None:
    """What is alive now stays: leave it out of collections. Call it once, when a start is over."""
    gc.freeze()
