"""Which tokens of a trace are trained, and the arrays of one branch. Pure: numpy in, numpy out.

Promises (R17, docs/protocols.md section 2):

- a sampled node trains in the first trainable branch that contains it; later branches hold it as context, so
  a token never trains twice;
- a token trains only when the run's policy sampled it and its log-probability is usable;
- routing rows are there for every token or not at all: the row of the last token, which no engine computes
  and nothing depends on, repeats the one before it; behind a hole the branch is cut, never filled up;
- spans tile the branch's tokens in node order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moorage.env.turns import Turn
from moorage.payload.codec import BranchArrays, cut
from moorage.records.payload import NodeSpan


@dataclass(frozen=True, slots=True)
class Node:
    """One message node: the tokens it adds, which of them were sampled, and the call that sampled them."""

    token_ids: Sequence[int]
    mask: Sequence[bool]
    content: Sequence[bool] = ()
    sampled: bool = False
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """A root-to-leaf path, and the nodes on it that this branch trains."""

    index: int
    path: tuple[int, ...]
    trains: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A branch ready to be encoded. `unusable`: tokens left untrained for want of a log-probability.

    `num_cut`: tokens dropped behind a hole in the routing rows.
    """

    index: int
    arrays: BranchArrays
    spans: tuple[NodeSpan, ...]
    versions: tuple[int, int] | None
    unusable: int
    num_cut: int


def plan_branches(nodes: Sequence[Node], paths: Sequence[tuple[int, tuple[int, ...]]]) -> list[BranchPlan]:
    """The branches that train anything, among the trainable `paths` (branch index, node ids), in order."""
    taken: set[int] = set()
    plans = []
    for index, path in paths:
        trains = frozenset(node for node in path if node not in taken and _trainable(nodes[node]))
        taken |= trains
        if trains:
            plans.append(BranchPlan(index, path, trains))
    return plans


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """A path's tokens in a row. `sampled` bool [T]; `logprobs` float32 [T], nan where sampled but unusable
    and 0 where no call sampled; node i of the path is `starts[i]:stops[i]`.
    """

    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


def read_streams(nodes: Sequence[Node], path: Sequence[int]) -> Streams:
    """Line up a path's arrays. Raises ValueError when a node's do not fit its tokens."""
    members = [nodes[number] for number in path]
    sizes = np.array([len(node.token_ids) for node in members], np.int64)
    stops = np.cumsum(sizes)
    length = int(sizes.sum())
    streams = Streams(
        token_ids=_joined([node.token_ids for node in members], np.int32),
        sampled=np.zeros(length, bool),
        logprobs=np.zeros(length, np.float32),
        starts=stops - sizes,
        stops=stops,
    )
    for number, node, start, stop in zip(path, members, streams.starts, stops, strict=True):
        sampled = streams.sampled[start:stop]
        sampled[:] = node.mask
        if node.turn is not None:
            if len(node.turn.logprobs) != sampled.sum():
                raise ValueError(
                    f"node {number} has {sampled.sum()} sampled tokens and {len(node.turn.logprobs)} "
                    "log-probabilities"
                )
            streams.logprobs[start:stop][sampled] = node.turn.logprobs
    return streams


def build_branch(nodes: Sequence[Node], plan: BranchPlan) -> Branch | None:
    """The arrays and spans of a planned branch, None when no token of it is left to train.

    Raises ValueError when a node's arrays do not fit its tokens.
    """
    path = [nodes[number] for number in plan.path]
    streams = read_streams(nodes, plan.path)
    length = len(streams.token_ids)
    wanted = np.zeros(length, bool)
    for number, start, stop in zip(plan.path, streams.starts, streams.stops, strict=True):
        wanted[start:stop] = streams.sampled[start:stop] & (number in plan.trains)
    usable = np.isfinite(streams.logprobs)
    trained = wanted & usable
    rows, kept = _routing(path, streams.stops, length)
    if not trained[:kept].any():
        return None
    arrays = BranchArrays(
        token_ids=streams.token_ids,
        loss_mask=trained.view(np.uint8),
        logprobs=np.where(usable, streams.logprobs, np.float32(0.0)),
        content_mask=_content(path),
        routed_experts=rows,
        **_sampling(path, streams),
        **_heads(path, streams, trained),
    )
    return Branch(
        index=plan.index,
        arrays=cut(arrays, kept),
        spans=_spans(plan.path, path, streams, trained, kept),
        versions=_versions(path),
        unusable=int((wanted & ~usable).sum()),
        num_cut=length - kept,
    )


def _trainable(node: Node) -> bool:
    return node.sampled and node.turn is not None and node.turn.policy and any(node.mask)


def _joined(parts: Sequence[Sequence[int]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _content(path: Sequence[Node]) -> np.ndarray | None:
    """Content flags, where the renderer gave them for every token."""
    if any(len(node.content) != len(node.token_ids) for node in path):
        return None
    return _joined([node.content for node in path], np.uint8)


def _spans(
    numbers: Sequence[int], path: Sequence[Node], streams: Streams, trained: np.ndarray, kept: int
) -> tuple[NodeSpan, ...]:
    spans = []
    for number, node, start, stop in zip(numbers, path, streams.starts, streams.stops, strict=True):
        if start >= kept and stop > start:
            break  # behind the cut
        first, last = int(start), min(int(stop), kept)
        where = np.flatnonzero(trained[first:last])
        first_trained = first + int(where[0]) if len(where) else -1
        spans.append(NodeSpan(number, first, last, node.sampled, first_trained, len(where)))
    return tuple(spans)


def _versions(path: Sequence[Node]) -> tuple[int, int] | None:
    named = [
        version
        for node in path
        if node.turn is not None and node.turn.policy
        for version, _, _ in node.turn.versions
        if version is not None
    ]
    return (min(named), max(named)) if named else None


def _routing(path: Sequence[Node], stops: np.ndarray, length: int) -> tuple[np.ndarray | None, int]:
    """Rows [length, layers, k], and how many tokens to keep: all, or up to the first that has no row.

    Without any row, or without one for the first token, there is no routing and all tokens are kept.
    """
    turns = [
        (node.turn, node.turn.rows, int(stop))
        for node, stop in zip(path, stops, strict=True)
        if node.turn is not None and node.turn.rows is not None and len(node.turn.rows)
    ]
    shapes = {rows.shape[1:] for _, rows, _ in turns}
    if not shapes:
        return None, length
    if len(shapes) > 1:
        raise ValueError(f"routing rows of different shapes in one branch: {sorted(shapes)}")
    out = np.zeros((length, *shapes.pop()), np.result_type(*(rows for _, rows, _ in turns)))
    known = np.zeros(length, bool)
    for turn, rows, stop in turns:
        if turn.prompt_len + len(turn.logprobs) != stop:
            continue  # the engine saw another sequence: these rows belong to other tokens
        end = min(turn.rows_start + len(rows), stop)
        out[turn.rows_start : end] = rows[: end - turn.rows_start]
        known[turn.rows_start : end] = True
    holes = np.flatnonzero(~known)
    if not len(holes):
        return out, length
    hole = int(holes[0])
    if hole == 0:
        return None, length
    out[hole] = out[hole - 1]  # nothing that is kept is predicted from this token
    return out, hole + 1


def _sampling(path: Sequence[Node], streams: Streams) -> dict[str, np.ndarray]:
    """Kept sets: a count for every token, 0 where none was recorded, and the flat ids."""
    if all(node.turn is None or node.turn.mask_counts is None for node in path):
        return {}
    counts = np.zeros(len(streams.token_ids), np.int32)
    ids = [np.zeros(0, np.int32)]
    for node, start, stop in zip(path, streams.starts, streams.stops, strict=True):
        if node.turn is not None and node.turn.mask_counts is not None:
            counts[start:stop][streams.sampled[start:stop]] = node.turn.mask_counts
            ids.append(np.asarray(node.turn.mask_ids, np.int32))
    return {"sampling_counts": counts, "sampling_ids": np.concatenate(ids)}


def _heads(path: Sequence[Node], streams: Streams, trained: np.ndarray) -> dict[str, np.ndarray]:
    """Top-k heads of the trained tokens, padded with -1 and -inf; nothing when no call had one."""
    turns = [
        (node.turn.head_ids, node.turn.head_logprobs, start, stop)
        for node, start, stop in zip(path, streams.starts, streams.stops, strict=True)
        if node.turn is not None and node.turn.head_ids is not None
    ]
    if not turns:
        return {}
    ids = np.full((len(trained), max(head.shape[1] for head, *_ in turns)), -1, np.int32)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    for head_ids, head_logprobs, start, stop in turns:
        where = start + np.flatnonzero(streams.sampled[start:stop])
        ids[where, : head_ids.shape[1]] = head_ids
        logprobs[where, : head_ids.shape[1]] = head_logprobs
    return {"head_ids": ids[trained], "head_logprobs": logprobs[trained]}
