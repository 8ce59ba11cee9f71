"""What metrics need of an episode, read from it once. Pure.

verifiers computes counts by walking branches anew at every access; a run reads them once per trace and drops
the rest, so that windows hold numbers and not episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verifiers.v1 import WireEpisode
from verifiers.v1.trace import min_new_input_tokens

from moorage.records.payload import TracePayload


@dataclass(frozen=True)
class TraceFacts:
    """Numbers of one trace. `reward` is None when it was not scored; `error` its last error's type."""

    id: str
    agent: str
    trainable: bool
    ok: bool
    reward: float | None
    input_tokens: int
    output_tokens: int
    total_tokens: int
    turns: int
    branches: int
    truncated: bool
    completed: bool
    error: str | None
    stop: str | None
    length_stop: bool
    timing: dict[str, float]
    metrics: dict[str, float]
    rewards: dict[str, float]
    detected: Mapping[str, bool]


@dataclass(frozen=True)
class EpisodeFacts:
    """Numbers of one episode. `span`: oldest and newest policy version, None for a frozen sampler."""

    id: str
    env: str
    group_id: str
    ok: bool
    traces: tuple[TraceFacts, ...]
    span: tuple[int, int] | None = None
    cancelled: bool = False
    sums: dict[str, float] = field(default_factory=dict)


COUNTS = ("num_total_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "num_branches")


def read_episode(
    episode: WireEpisode,
    *,
    env: str,
    group_id: str,
    span: tuple[int, int] | None = None,
    payloads: Mapping[str, TracePayload | None] | None = None,
) -> EpisodeFacts:
    """The facts of one final episode."""
    payloads = payloads or {}
    traces = tuple(read_trace(trace, payloads.get(trace.id)) for trace in episode.traces)
    return EpisodeFacts(episode.id, env, group_id, episode.ok, traces, span, sums=add_up(traces))


def add_up(traces: Iterable[TraceFacts]) -> dict[str, float]:
    """The sizes of an episode: sums over `traces`."""
    traces = tuple(traces)
    return {
        "num_total_tokens": sum(trace.total_tokens for trace in traces),
        "num_input_tokens": sum(trace.input_tokens for trace in traces),
        "num_output_tokens": sum(trace.output_tokens for trace in traces),
        "num_turns": sum(trace.turns for trace in traces),
        "num_branches": sum(trace.branches for trace in traces),
    }


def only(episode: EpisodeFacts, wanted: Callable[[TraceFacts], bool]) -> EpisodeFacts:
    """`episode` with the traces that are wanted."""
    traces = tuple(trace for trace in episode.traces if wanted(trace))
    if len(traces) == len(episode.traces):
        return episode
    return replace(episode, traces=traces, sums=add_up(traces))


def read_trace(trace: Any, payload: TracePayload | None = None) -> TraceFacts:
    """The facts of one trace."""
    branches, input_tokens, output_tokens, total_tokens = count_tokens(trace)
    return TraceFacts(
        id=trace.id,
        agent=trace.agent.name,
        trainable=trace.agent.trainable,
        ok=trace.ok,
        reward=read_reward(trace),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=total_tokens,
        turns=sum(1 for node in trace.nodes if node.sampled),
        branches=branches,
        truncated=trace.is_truncated,
        completed=trace.is_completed,
        error=None if trace.ok else (trace.errors[-1].type if trace.errors else "EpisodeFailed"),
        stop=trace.stop_condition,
        length_stop=trace.is_truncated and trace.stop_condition != "prompt_too_long",
        timing=read_timing(trace.timing),
        metrics={name: value or 0.0 for name, value in trace.metrics.items()},
        rewards={name: 0.0 if reward is None else reward.value for name, reward in trace.rewards.items()},
        detected=payload.detected if payload is not None else {},
    )


def read_reward(trace: Any) -> float | None:
    """The trace's reward; None when a part of it was not scored or it is not a number. Zero is a reward."""
    if any(reward is None for reward in trace.rewards.values()):
        return None
    value = float(trace.reward)
    return value if math.isfinite(value) else None


def count_tokens(trace: Any) -> tuple[int, int, int, int]:
    """(branches, input, output, total tokens) as verifiers counts them, in one walk over the graph.

    Input: what each call fed in beyond the call before it on its branch, once per call. Output: summed over
    branches, so a call shared by branches counts in each. Total: input, and each call's output once.
    """
    nodes = trace.nodes
    parents = {node.parent for node in nodes if node.parent is not None}
    leaves = [at for at in range(len(nodes)) if at not in parents]
    by_node = {call.node: call for call in trace.calls if call.node is not None}
    seen: set[int] = set()
    input_tokens = output_tokens = 0
    for leaf in leaves:
        path, at = [], leaf
        while at is not None:
            if at in by_node:
                path.append(by_node[at])
            at = nodes[at].parent
        path.reverse()
        for call, fed in min_new_input_tokens(path):
            output_tokens += call.usage.completion_tokens if call.usage else 0
            if id(call) not in seen:
                seen.add(id(call))
                input_tokens += fed
    completion = sum(call.usage.completion_tokens for call in trace.calls if call.usage is not None)
    return len(leaves), input_tokens, output_tokens, input_tokens + completion


def read_timing(timing: Any) -> dict[str, float]:
    """Seconds of each stage, and their total."""
    stages = {
        "setup": timing.setup.duration,
        "agent": timing.agent.duration,
        "finalize": timing.finalize.duration,
        "scoring": timing.scoring.duration,
    }
    total = sum(stages.values())
    return stages | {
        "agent/model": timing.agent.model.duration,
        "agent/harness": timing.agent.harness.duration,
        "total": total,
    }
