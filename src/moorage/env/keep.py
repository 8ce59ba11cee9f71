"""Keep an episode's arrays and send on its text (R1, R2).

Called when an episode is final, on a thread: it encodes every branch that trains, writes the blobs, notes
them in `trace.info["moorage_payload"]`, and strips every per-token array from the traces.

Promises: an episode that is not ok keeps nothing; when one branch cannot be kept, what the episode kept
before it is freed and the episode fails with the reason; afterwards no node holds an array.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from verifiers.v1.episode import Episode
from verifiers.v1.trace import Error, Trace

from moorage.core.errors import PayloadError
from moorage.env.branches import Branch, Node, build_branch, plan_branches, read_streams
from moorage.env.detectors import Detector
from moorage.env.turns import SideTable
from moorage.payload.codec import Buffer, encode, nbytes_of
from moorage.records.payload import BranchPayload, TracePayload

INFO_KEY = "moorage_payload"
KEEP_TIMEOUT_S = 60.0
"""How long a keep may wait for room in the spool."""


class Keeper(Protocol):
    """What `keep_episode` needs of a `payload.spool.Spool`."""

    def keep(self, request_id: str, buffers: Any, timeout_s: float) -> str: ...

    def free(self, blob_ids: Any, holder: str) -> Any: ...

    def remove_file(self, entry: Any) -> None: ...


def keep_episode(
    episode: Episode,
    spool: Keeper,
    request_id: str,
    side_table: SideTable,
    url: str,
    store: str,
    detectors: Mapping[str, Detector] | None = None,
) -> None:
    """Keep, note, strip. Blocks on disk and for room in the spool: call it on a thread.

    Afterwards `episode.ok` says whether the payloads are there; nothing is raised for an episode that fails.
    """
    kept: list[str] = []

    def keep(buffers: Sequence[Buffer]) -> str:
        kept.append(spool.keep(request_id, buffers, KEEP_TIMEOUT_S))
        return kept[-1]

    try:
        if episode.ok:
            for trace in episode.traces:
                nodes = read_nodes(trace, side_table)
                branches = tuple(_keep_branch(branch, keep) for branch in trainable_branches(trace, nodes))
                detected = _detect(trace, nodes, detectors or {})
                payload = TracePayload(url=url, store=store, detected=detected, branches=branches)
                trace.info[INFO_KEY] = msgspec.json.decode(msgspec.json.encode(payload))
    except (PayloadError, ValueError) as error:  # this episode's own arrays: its siblings live on
        for entry in spool.free(kept, "env_server").freed:
            spool.remove_file(entry)
        _fail(episode, error)
    finally:
        for trace in episode.traces:
            strip_arrays(trace)


def read_payload(trace: Trace) -> TracePayload | None:
    """What `keep_episode` noted on a trace; None when its env server is not moorage's (R8)."""
    noted = trace.info.get(INFO_KEY)
    return None if noted is None else msgspec.convert(noted, TracePayload)


def strip_arrays(trace: Trace) -> None:
    """Take every per-token array off the trace's nodes."""
    for node in trace.nodes:
        node.token_ids, node.mask, node.is_content, node.logprobs = [], [], [], []
        node.renderer_token_ids = None
        node.advantages = node.reference_logprobs = node.trainer_logprobs = node.entropies = None
        node.loss_weights = node.routed_experts = node.sampling_mask = None


def trainable_branches(trace: Trace, nodes: Sequence[Node]) -> list[Branch]:
    """The branches of a trace that train: none when the agent is not trained or the trace failed."""
    if not trace.ok or not trace.agent.trainable:
        return []
    paths = [(index, path) for index, path, trainable in _paths(trace) if trainable]
    built = (build_branch(nodes, plan) for plan in plan_branches(nodes, paths))
    return [branch for branch in built if branch is not None]


def _paths(trace: Trace) -> list[tuple[int, tuple[int, ...], bool]]:
    """(branch index, node numbers, whether verifiers lets it train) for each branch."""
    number = {id(node): n for n, node in enumerate(trace.nodes)}
    return [(b.index, tuple(number[id(node)] for node in b.nodes), b.trainable) for b in trace.branches]


def _detect(trace: Trace, nodes: Sequence[Node], detectors: Mapping[str, Detector]) -> dict[str, bool]:
    """Every detector over every branch, trained or not."""
    streams = [read_streams(nodes, path) for _, path, _ in _paths(trace)] if detectors else []
    return {
        name: any(detector(s.token_ids, s.sampled, s.logprobs) for s in streams)
        for name, detector in detectors.items()
    }


def read_nodes(trace: Trace, side_table: SideTable) -> list[Node]:
    """The trace's nodes as plain records, each sampled one with its turn."""
    return [
        Node(
            token_ids=node.token_ids,
            mask=node.mask,
            content=node.is_content,
            sampled=node.sampled,
            turn=side_table.find(trace.id, node.logprobs) if node.sampled else None,
        )
        for node in trace.nodes
    ]


def _keep_branch(branch: Branch, keep: Callable[[Sequence[Buffer]], str]) -> BranchPayload:
    arrays = branch.arrays
    buffers = encode(arrays)
    return BranchPayload(
        branch=branch.index,
        id=keep(buffers),
        num_tokens=arrays.num_tokens,
        num_trainable=arrays.num_trainable,
        fields=tuple(arrays.present()),
        routing=arrays.routing,
        nbytes=nbytes_of(buffers),
        versions=branch.versions,
        spans=branch.spans,
    )


def _fail(episode: Episode, error: Exception) -> None:
    episode.ok = False
    episode.errors.append(
        Error(
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
    )
    for trace in episode.traces:
        trace.info.pop(INFO_KEY, None)
