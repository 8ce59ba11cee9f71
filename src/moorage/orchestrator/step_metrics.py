"""The orchestrator's row of one step, from the window and the batch that end with it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moorage.orchestrator.facts import EpisodeFacts, only
from moorage.orchestrator.metrics import (
    agent_metrics,
    episode_metrics,
    off_policy_metrics,
    share,
)
from moorage.orchestrator.outcomes import DROP_REASONS
from moorage.orchestrator.progress import Progress
from moorage.orchestrator.sink_records import Batch, Scored, Window


@dataclass(frozen=True)
class Sizes:
    """Sums over the episodes of a window. `tasks`: groups that they belong to."""

    tokens: int
    input_tokens: int
    output_tokens: int
    rollouts: int
    tasks: int


def window_sizes(window: Window) -> Sizes:
    """What was finalised in the window; cancelled episodes are no rollouts."""
    ended = [each for each in window.episodes if not each.cancelled]

    def total(name: str) -> int:
        return int(sum(each.sums.get(name, 0) for each in ended))

    return Sizes(
        tokens=total("num_total_tokens"),
        input_tokens=total("num_input_tokens"),
        output_tokens=total("num_output_tokens"),
        rollouts=len(ended),
        tasks=len({each.group_id for each in ended}),
    )


def advance(progress: Progress, sizes: Sizes) -> None:
    """The cut of a step: the next one collects, and the totals grow."""
    progress.step += 1
    progress.total_tokens += sizes.tokens
    progress.total_rollouts += sizes.rollouts
    progress.total_tasks += sizes.tasks


def step_metrics(batch: Batch, sizes: Sizes, progress: Progress, sources: Sequence[str]) -> dict[str, float]:
    """Everything about the episodes of a step: rewards, scopes, drops, staleness, progress."""
    window, values = batch.window, {}
    values |= reward_metrics(window.arrived)
    effective = shipped_episodes(batch.cohort)
    for scope, chosen in scopes(sources):
        everything = [each for each in window.episodes if chosen is None or each.env == chosen]
        trained = [each for each in effective if chosen is None or each.env == chosen]
        values |= episode_metrics(scope, "all", everything)
        values |= agent_metrics(scope, "all", everything, window.marks)
        values |= episode_metrics(scope, "effective", trained)
        values |= agent_metrics(scope, "effective", trained, window.marks)
    values |= drop_metrics(window)
    values |= off_policy_metrics(_spans(batch.cohort), batch.step - 1)
    values["off_policy/dropped"] = window.num_stale
    values |= batch_metrics(batch, sources)
    values |= {
        "progress/tokens": sizes.tokens,
        "progress/input_tokens": sizes.input_tokens,
        "progress/output_tokens": sizes.output_tokens,
        "progress/rollouts": sizes.rollouts,
        "progress/tasks": sizes.tasks,
        "progress/total_tokens": progress.total_tokens,
        "progress/total_rollouts": progress.total_rollouts,
        "progress/total_tasks": progress.total_tasks,
    }
    return values


def scopes(sources: Sequence[str]) -> Iterable[tuple[str, str | None]]:
    """Metric scope and the source it is about, None for all."""
    return [("train/agg", None), *((f"train/{name}", name) for name in sources)]


def reward_metrics(episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    """`reward/mean` over the scored, trainable, clean traces of ok episodes that arrived in the window."""
    rewards = [
        trace.reward
        for each in episodes
        if each.ok
        for trace in each.traces
        if trace.ok and trace.trainable and trace.reward is not None
    ]
    return {"reward/mean": math.fsum(rewards) / len(rewards)} if rewards else {}


def shipped_episodes(cohort: Sequence[Scored]) -> list[EpisodeFacts]:
    """The episodes of the shipped traces, each with these traces only."""
    chosen: dict[str, set[str]] = {}
    facts: dict[str, EpisodeFacts] = {}
    for scored in cohort:
        chosen.setdefault(scored.facts.id, set()).add(scored.trace.id)
        facts[scored.facts.id] = scored.facts
    return [only(each, lambda trace, ids=chosen[each.id]: trace.id in ids) for each in facts.values()]


def drop_metrics(window: Window) -> dict[str, float]:
    """Shares of the survivors that were decided in the window; reasons overlap, so they need not add up."""
    decisions = window.decisions
    values = {"dropped/all/rate": share(bool(reasons) for reasons in decisions)}
    for name in DROP_REASONS:
        values[f"dropped/all/{name}/rate"] = share(name in reasons for reasons in decisions)
    values["groups/lone_survivor"] = window.num_lone
    return values


def batch_metrics(batch: Batch, sources: Sequence[str]) -> dict[str, float]:
    """What the batch is made of."""
    envs = Counter(scored.arrived.group.source for scored in batch.cohort)
    spans = [span for sample in batch.samples for span in sample.spans]
    tokens = sum(span.stop - span.start for span in spans)
    flat = sum(span.stop - span.start for span in spans if span.advantage == 0.0)
    return {
        **{f"batch/{name}": envs[name] / len(batch.cohort) for name in sources},
        "batch/traces": len(batch.cohort),
        "batch/samples": len(batch.samples),
        "batch/tokens": sum(sample.num_tokens for sample in batch.samples),
        "batch/cut": share(s.num_tokens < s.payload.total_tokens for s in batch.samples),
        "batch/zero_advantage_tokens": flat / tokens if tokens else 0.0,
    }


def _spans(cohort: Sequence[Scored]) -> list[tuple[int, int]]:
    return [scored.facts.span for scored in cohort if scored.facts.span is not None]
