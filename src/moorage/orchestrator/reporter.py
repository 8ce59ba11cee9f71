"""What a run says about itself: the metrics row of each step, effective episodes, sample tables, the last
line.

Reads the other parts, changes nothing in them but the windows that a row ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from verifiers.v1 import WireEpisode

from moorage.config.run import WandbConfig
from moorage.monitor.fanout import Fanout
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.episodes import EpisodeLog, effective_copy
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.lag import LoopLag
from moorage.orchestrator.outcomes import Outcomes
from moorage.orchestrator.policy import PolicyWatcher
from moorage.orchestrator.progress import Progress
from moorage.orchestrator.ship import Written
from moorage.orchestrator.sink_records import Batch
from moorage.orchestrator.step_metrics import Sizes, step_metrics
from moorage.orchestrator.tables import choose_episodes, sample_rows
from moorage.records.payload import Ledger


@dataclass(frozen=True)
class Watched:
    """The parts whose numbers go into a row."""

    monitor: Fanout
    episodes: EpisodeLog
    dispatcher: Dispatcher
    watcher: PolicyWatcher
    holdings: Holdings
    outcomes: Outcomes
    lag: LoopLag


class Reporter:
    """One per run."""

    def __init__(
        self, parts: Watched, sources: Sequence[str], *, wandb: WandbConfig | None, seed: int
    ) -> None:
        self.ledger = Ledger()
        self._parts = parts
        self._sources = list(sources)
        self._wandb = wandb
        self._seed = seed
        self._shipped_at = time.monotonic()

    def log_step(
        self, batch: Batch, sizes: Sizes, progress: Progress, written: Written, held_s: float
    ) -> None:
        """The row of a step that has shipped. `held_s`: how long the batch waited for a policy version."""
        now = time.monotonic()
        values = step_metrics(batch, sizes, progress, self._sources)
        values |= {
            "time/step": now - self._shipped_at,
            "time/pack": written.pack_s,
            "time/save_ckpt": written.write_s,
            "time/wait_for_policy": held_s,
            "batch/bytes": written.size_bytes,
            "batch/micro_batches": written.num_micro_batches,
            "batch/dummies": written.num_dummies,
        }
        self._shipped_at = now
        parts = self._parts
        values |= parts.watcher.metrics() | parts.dispatcher.metrics() | parts.lag.take() | self.totals()
        parts.monitor.log(values, batch.step)

    def log_last(self, step: int) -> None:
        """The final counts, once everything is given back."""
        version = self._parts.watcher.policy.version
        self._parts.monitor.log(self.totals() | {"policy/version": version}, step)

    def totals(self) -> dict[str, float]:
        """Cumulative counts: of episodes, and of payloads as the env servers last told."""
        ledger = self.ledger
        return self._parts.outcomes.metrics() | {
            "payload/kept": ledger.kept,
            "payload/bytes": ledger.kept_bytes,
            "payload/outstanding": ledger.outstanding,
            "payload/double_frees": ledger.double_frees,
            "payload/unknown": ledger.unknown,
            "payload/held": self._parts.holdings.num_outstanding,
            **{f"payload/freed/{holder}": count for holder, count in ledger.freed.items()},
        }

    def log_effective(self, batch: Batch) -> None:
        """The shipped traces, and from time to time a table of some of them."""
        advantages: dict[str, dict[str, float | None]] = {}
        episodes: dict[str, WireEpisode] = {}
        for scored in batch.cohort:
            episode = episodes.setdefault(scored.facts.id, scored.arrived.episode)
            advantages.setdefault(episode.id, {})[scored.trace.id] = scored.advantage
        for episode_id, episode in episodes.items():
            copy = effective_copy(episode, advantages[episode_id])
            self._parts.episodes.add(batch.step, "train", "effective", copy)
        wandb = self._wandb
        if wandb is not None and batch.step % wandb.sample_interval == 0:
            chosen = choose_episodes(list(episodes.values()), wandb.num_samples, f"{self._seed}/{batch.step}")
            rows = sample_rows(chosen, batch.step, wandb.num_samples)
            self._parts.monitor.log_samples("train", rows, batch.step)
