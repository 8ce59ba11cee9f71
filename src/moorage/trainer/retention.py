"""When this rank's payloads may be deleted (R10).

`fetched`: as soon as every rank has them. `checkpoint`: once a whole checkpoint covers their step, so that a
trainer that resumes from it finds the payloads of every later step; until then they stay owned here.
"""

from __future__ import annotations

import threading
import time

from moorage.config.run import CheckpointConfig
from moorage.core.errors import ConfigError, RunEnded
from moorage.core.log import get_logger
from moorage.core.rundir import PeerWatch, RunDir, whole_checkpoints
from moorage.trainer.data import BatchFeed

log = get_logger(__name__)

FINAL_WAIT_S = 120.0


class Retention:
    """Frees the feed's payloads at the right time."""

    def __init__(self, run: RunDir, retain: str, checkpoint: CheckpointConfig, feed: BatchFeed) -> None:
        if retain == "checkpoint" and checkpoint.interval is None:
            raise ConfigError(
                'payload.retain = "checkpoint" keeps payloads until a checkpoint covers them, but none is '
                "ever saved; set checkpoint.interval"
            )
        self.run = run
        self.until_checkpoint = retain == "checkpoint"
        self.feed = feed

    def settle(self, step: int) -> None:
        """Every rank has the payloads of `step`: free what may go. Collective."""
        if not self.until_checkpoint:
            self.feed.settle(step)
            return
        self._free_covered()

    def finish(self, last: int, watch: PeerWatch, stop: threading.Event) -> None:
        """After the last step: wait for the orchestrator's part of the checkpoint, then free. Collective.

        Unblocked by the orchestrator's READY, its death, a stop, or `FINAL_WAIT_S`.
        """
        if not self.until_checkpoint:
            return
        deadline = time.monotonic() + FINAL_WAIT_S
        world = self.feed.world
        while world.is_main and last not in whole_checkpoints(self.run):
            try:
                watch.check()
            except RunEnded as ended:
                log.warning("payloads stay: the last checkpoint is not whole (%s)", ended)
                break
            if stop.is_set() or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self._free_covered()

    def _free_covered(self) -> None:
        """Free the steps up to the newest whole checkpoint. The main rank's reading counts for all."""
        import torch

        world = self.feed.world
        newest = whole_checkpoints(self.run)[-1:] if world.is_main else []
        covered = int(world.all_reduce(torch.tensor([float(newest[0] if newest else 0)]), "max")[0])
        for step in self.feed.held_steps():
            if step <= covered:
                self.feed.settle(step)
