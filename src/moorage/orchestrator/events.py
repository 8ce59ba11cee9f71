"""What the dispatcher tells the sinks, and how an episode without a run is written down.

`Arrived`: an episode is final, ok or not. `Cancelled`: a group was dropped; its missing episodes will never
come. Every dispatched episode is in exactly one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verifiers.v1 import WireEpisode
from verifiers.v1.episode import EnvInfo
from verifiers.v1.trace import Error

from moorage.core.errors import EnvServerError
from moorage.env.keep import read_payload
from moorage.orchestrator.groups import Cancellation, Group
from moorage.records.payload import TracePayload


@dataclass(frozen=True)
class Arrived:
    """One final episode of `group`. `payloads`: per trace id its record, None when the server wrote none.

    `duration_s`: from dispatch to return. `infra`: an infrastructure failure, retried in vain.
    """

    group: Group
    episode: WireEpisode
    payloads: dict[str, TracePayload | None] = field(default_factory=dict)
    duration_s: float = 0.0
    infra: bool = False


@dataclass(frozen=True)
class Cancelled:
    """The rest of a group will not come."""

    cancellation: Cancellation

    @property
    def group(self) -> Group:
        return self.cancellation.group


Event = Arrived | Cancelled


def episodes_of(event: Event) -> list[WireEpisode]:
    """The episodes that an event is about; cancelled ones are made here, without traces (R13)."""
    if isinstance(event, Arrived):
        return [event.episode]
    cancellation = event.cancellation
    message = f"the group was dropped: {cancellation.reason}"
    return [
        failed_episode(event.group.task, event.group.source, "cancelled", message)
        for _ in range(cancellation.count)
    ]


def read_payloads(episode: WireEpisode) -> dict[str, TracePayload | None]:
    """The payload record of each trace, by trace id."""
    traces: list[Any] = [*episode.traces]  # verifiers' generics are invariant
    return {trace.id: read_payload(trace) for trace in traces}


def failed_episode(task: dict[str, Any], env_name: str, kind: str, message: str) -> WireEpisode:
    """An episode that produced nothing: not ok, no traces, the reason in `errors` (R13).

    `task` as `sample` gave it; empty when it gave none.
    """
    return WireEpisode(
        env=EnvInfo(name=env_name),
        task=WireEpisode.model_validate({"task": {"type": "", "data": {}, **task}}).task,
        errors=[Error(type=kind, message=message)],
    )


def mark_failed(episode: WireEpisode, kind: str, message: str) -> None:
    """Turn an episode that claims to be ok into a failed one."""
    episode.ok = False
    episode.errors.append(Error(type=kind, message=message))


INFRA_KINDS = frozenset({"worker_died", "unreachable", "server_stopping", "refused", "cancelled"})
"""Kinds of env-server errors that say nothing about task or policy."""
_INFRA_TYPES = INFRA_KINDS | {
    "SampleError",
    "SandboxError",
    "InterceptionError",
    "TunnelError",
    "EngineError",
    "PayloadError",
}


def is_infra_episode(episode: WireEpisode) -> bool:
    """Whether a failed episode's last errors say that it was lost to infrastructure."""
    if episode.ok:
        return False
    errors = [trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors]
    errors += episode.errors[-1:]
    return any(_is_infra_error(error) for error in errors)


def _is_infra_error(error: Error) -> bool:
    """A provider's refusal (too long a prompt) is the policy's doing; its outage is not."""
    transient = error.status_code is None or error.status_code >= 500 or error.status_code in (408, 429)
    return error.type in _INFRA_TYPES or (error.type == "ProviderError" and transient)


def check_task(group: Group, episode: WireEpisode) -> None:
    """The server must answer for the task it was given; anything else would be trained under a wrong name."""
    for name in ("key", "hash"):
        asked, answered = group.task.get(name), getattr(episode.task, name)
        if asked is not None and asked != answered:
            raise EnvServerError(
                "bad_request",
                f"source `{group.source}`: sent task {name} {asked!r}, the episode answers for {answered!r}; "
                "its environment has to run the task it is given, and task data must not change on the wire",
            )


def check_complete(episode: WireEpisode) -> None:
    """An ok episode has traces, and each has at least one turn."""
    if not episode.ok:
        return
    if not episode.traces:
        mark_failed(episode, "EmptyEpisode", "the environment ran no agent")
        return
    for trace in episode.traces:
        if trace.ok and not any(node.sampled for node in trace.nodes):
            trace.ok = False
            mark_failed(episode, "EmptyTrajectory", f"agent {trace.agent.name} took no turn")
