"""Numbers of a window of episodes, by flat names. Pure.

Scopes: `train/agg`, `train/<env>`, `eval/<env>`; subsets `all` (what arrived in the window) and `effective`
(what trains, or for eval what did not fail). Promises:

- an episode without traces belongs to no agent: it shows in `has_error` and `cancelled` of its scope only;
- rates are over a stated whole and independent of each other (R19);
- a distribution over nothing gives no keys; every count and every registered rate is there, zeros included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moorage.core.metrics import describe
from moorage.orchestrator.facts import COUNTS, EpisodeFacts, TraceFacts


@dataclass(frozen=True)
class TrainMarks:
    """What the train sink decided on a trace: its credit read as one number, and whether no rule drops it."""

    advantage: float | None
    admitted: bool


NO_MARKS = TrainMarks(None, False)


def episode_metrics(scope: str, subset: str, episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    """Sizes of episodes; for `all` also the shares that failed and were cancelled."""
    prefix = f"{scope}/{subset}"
    values: dict[str, float] = {}
    for name in COUNTS:
        values |= describe(f"{prefix}/{name}", [each.sums[name] for each in episodes if each.traces])
    if subset == "all" and episodes:
        values[f"{prefix}/has_error/mean"] = share(not each.ok and not each.cancelled for each in episodes)
        values[f"{prefix}/cancelled/mean"] = share(each.cancelled for each in episodes)
    return values


def agent_metrics(
    scope: str,
    subset: str,
    episodes: Sequence[EpisodeFacts],
    marks: Mapping[str, TrainMarks] | None = None,
) -> dict[str, float]:
    """Numbers per agent. `marks` (train): by trace id."""
    by_agent: dict[str, list[tuple[str, TraceFacts]]] = defaultdict(list)
    for episode in episodes:
        for trace in episode.traces:
            by_agent[trace.agent].append((episode.group_id, trace))
    values: dict[str, float] = {}
    for agent, members in sorted(by_agent.items()):
        prefix = f"{scope}/{subset}/{agent}"
        traces = [trace for _, trace in members]
        values |= trace_metrics(prefix, traces)
        if subset == "all":
            values |= fault_metrics(prefix, traces)
            values |= solve_metrics(prefix, members)
        if marks is not None:
            values |= mark_metrics(prefix, [marks.get(trace.id, NO_MARKS) for trace in traces])
    return values


def trace_metrics(prefix: str, traces: Sequence[TraceFacts]) -> dict[str, float]:
    """Reward, sizes, endings, times and the environment's own numbers of one agent's traces."""
    values = describe(f"{prefix}/reward", [t.reward for t in traces if t.reward is not None])
    sizes = {
        "num_total_tokens": [t.total_tokens for t in traces],
        "num_input_tokens": [t.input_tokens for t in traces],
        "num_output_tokens": [t.output_tokens for t in traces],
        "num_turns": [t.turns for t in traces],
        "num_branches": [t.branches for t in traces],
    }
    for name, numbers in sizes.items():
        values |= describe(f"{prefix}/{name}", numbers)
    values[f"{prefix}/is_truncated/mean"] = share(t.truncated for t in traces)
    values[f"{prefix}/is_completed/mean"] = share(t.completed for t in traces)
    values[f"{prefix}/unscored/mean"] = share(t.reward is None for t in traces)
    values |= _describe_tables(f"{prefix}/timing", [t.timing for t in traces])
    values |= _describe_tables(f"{prefix}/metrics", [t.metrics for t in traces])
    values |= _describe_tables(f"{prefix}/rewards", [t.rewards for t in traces])
    values[f"{prefix}/stop_condition/generation_truncated"] = share(t.length_stop for t in traces)
    stopped = [t.stop for t in traces if t.stop is not None]
    for condition in sorted(set(stopped)):
        values[f"{prefix}/stop_condition/{condition}"] = stopped.count(condition) / len(stopped)
    return values


def fault_metrics(prefix: str, traces: Sequence[TraceFacts]) -> dict[str, float]:
    """Failures by type, and what the detectors measured (every trace, R19)."""
    values = {f"{prefix}/has_error/mean": share(not t.ok for t in traces)}
    for kind in sorted({t.error for t in traces if t.error is not None}):
        values[f"{prefix}/error/{kind}"] = sum(t.error == kind for t in traces)
    for name in sorted({name for t in traces for name in t.detected}):
        values[f"{prefix}/detected/{name}/mean"] = share(t.detected.get(name, False) for t in traces)
    return values


def solve_metrics(prefix: str, members: Sequence[tuple[str, TraceFacts]]) -> dict[str, float]:
    """Share of groups of which nothing, everything, or a part was solved. Scored traces only."""
    groups: dict[str, list[float]] = defaultdict(list)
    for group_id, trace in members:
        if trace.ok and trace.reward is not None:
            groups[group_id].append(trace.reward)
    if not groups:
        return {}
    none = share(math.fsum(rewards) == 0 for rewards in groups.values())
    every = share(all(reward == 1.0 for reward in rewards) for rewards in groups.values())
    return {
        f"{prefix}/solved_none": none,
        f"{prefix}/solved_all": every,
        f"{prefix}/solved_some": 1.0 - none - every,
    }


def mark_metrics(prefix: str, marks: Sequence[TrainMarks]) -> dict[str, float]:
    """Share of traces with any nonzero credit, and share that shipped."""
    return {
        f"{prefix}/is_trainable/mean": share(bool(mark.advantage) for mark in marks),
        f"{prefix}/is_admitted/mean": share(mark.admitted for mark in marks),
    }


def pass_metrics(
    prefix: str, groups: Mapping[str, Sequence[float]], group_size: int, *, binary: bool
) -> dict[str, float]:
    """`avg@n` over all rewards; with `binary` also pass@k and pass^k when every reward is 0 or 1.

    For a group with n rewards and c ones: pass@k = 1 - C(n-c, k) / C(n, k), pass^k = C(c, k) / C(n, k), for k
    the powers of two up to n; averaged over the groups that have k.
    """
    rewards = [reward for members in groups.values() for reward in members]
    if not rewards:
        return {}
    values = {f"{prefix}/avg@{group_size}": math.fsum(rewards) / len(rewards)}
    if not binary or any(reward not in (0.0, 1.0) for reward in rewards):
        return values
    at: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for members in groups.values():
        n, c = len(members), sum(reward == 1.0 for reward in members)
        k = 1
        while k <= n:
            at[k].append((1 - math.comb(n - c, k) / math.comb(n, k), math.comb(c, k) / math.comb(n, k)))
            k *= 2
    for k, pairs in sorted(at.items()):
        values[f"{prefix}/pass@{k}"] = math.fsum(any_ for any_, _ in pairs) / len(pairs)
        values[f"{prefix}/pass^{k}"] = math.fsum(all_ for _, all_ in pairs) / len(pairs)
    return values


def off_policy_metrics(spans: Iterable[tuple[int, int]], trained_version: int) -> dict[str, float]:
    """Versions that samples are behind `trained_version`: in all, while generated, and while waiting."""
    totals, in_flight, in_queue = [], [], []
    for start, end in spans:
        total = max(0, trained_version - start)
        flown = min(total, end - start)
        totals.append(total)
        in_flight.append(flown)
        in_queue.append(total - flown)
    values: dict[str, float] = {}
    for name, numbers in (("", totals), ("in_flight/", in_flight), ("in_queue/", in_queue)):
        values[f"off_policy/{name}mean"] = sum(numbers) / len(numbers) if numbers else 0.0
        values[f"off_policy/{name}max"] = max(numbers, default=0)
    return values


def share(flags: Iterable[bool]) -> float:
    """Share of true flags; 0 of none."""
    flags = list(flags)
    return sum(map(bool, flags)) / len(flags) if flags else 0.0


def _describe_tables(prefix: str, tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name in sorted({name for table in tables for name in table}):
        values |= describe(f"{prefix}/{name}", [table[name] for table in tables if name in table])
    return values
