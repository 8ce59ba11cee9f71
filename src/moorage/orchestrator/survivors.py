"""Which traces train, and which server they may come from. Pure."""

from __future__ import annotations

from typing import Any

from moorage.core.errors import ConfigError
from moorage.orchestrator.events import Arrived
from moorage.orchestrator.facts import read_reward


def is_candidate(trace: Any) -> bool:
    """A clean trace that the policy sampled and that trains it."""
    return trace.ok and trace.agent.trainable and any(node.sampled for node in trace.nodes)


def survives(trace: Any) -> bool:
    """A candidate with a reward that is a number: what baselines are over."""
    return is_candidate(trace) and read_reward(trace) is not None


def check_payloads(event: Arrived) -> None:
    """Raise ConfigError when a trace of an ok episode has no payload record (R8)."""
    for trace_id, payload in event.payloads.items():
        if payload is None:
            raise ConfigError(
                f"train source `{event.group.source}`: trace {trace_id} came without a payload record, "
                "so its env server is not moorage's; start it with `moorage env-server` (R8)"
            )
