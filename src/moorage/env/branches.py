"""Which tokens of a trace are trained, and the arrays of one branch. Pure: numpy in, numpy out.

Promises (R17, docs/protocols.md section 2):

- a sampled node trains in the first trainable branch that contains it; later branches hold it as context, so
  a token never trains twice;
- a token trains only when the run's policy sampled it and its log-probability is usable;
- routing rows are there for every token or not at all: the row of the very last sampled token, which no engine
  computes, repeats the one before it; behind a hole the branch is cut, never filled up;
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


def build_branch(nodes: Sequence[Node], plan: BranchPlan) -> Branch | None:
    """The arrays and spans of a planned branch, None when no token of it is left to train.

    Raises ValueError when a node's arrays do not fit its tokens.
    """
    path = [nodes[node] for node in plan.path]
    stops = np.cumsum([len(node.token_ids) for node in path], dtype=np.int64)
    starts = stops - [len(node.token_ids) for node in path]
    length = int(stops[-1])
    logprobs = np.zeros(length, np.float32)
    sampled = np.zeros(length, bool)
    trained = np.zeros(length, bool)
    for number, node, start, stop in zip(plan.path, path, starts, stops, strict=True):
        sampled[start:stop] = node.mask
        if node.turn is not None:
            logprobs[start:stop][sampled[start:stop]] = _fitting(number, node)
            trained[start:stop] = sampled[start:stop] & (number in plan.trains)
    usable = np.isfinite(logprobs)
    unusable = int((trained & ~usable).sum())
    trained &= usable
    logprobs[~usable] = 0.0
    rows, routed = _routing(path, stops, length)
    arrays = BranchArrays(
        token_ids=_joined([node.token_ids for node in path], np.int32),
        loss_mask=trained.view(np.uint8),
        logprobs=logprobs,
        content_mask=_content(path),
        routed_experts=rows,
        **_sampling(path, sampled, starts, stops),
        **_heads(path, trained, sampled, starts, stops),
    )
    kept = length if rows is None else routed
    if not trained[:kept].any():
        return None
    spans = tuple(
        _span(number, node, int(start), min(int(stop), kept), trained)
        for number, node, start, stop in zip(plan.path, path, starts, stops, strict=True)
        if start < kept or start == stop
    )
    return Branch(plan.index, cut(arrays, kept), spans, _versions(path), unusable, length - kept)


def _trainable(node: Node) -> bool:
    return node.sampled and node.turn is not None and node.turn.policy and any(node.mask)


def _fitting(number: int, node: Node) -> np.ndarray:
    assert node.turn is not None
    if len(node.turn.logprobs) != sum(node.mask):
        raise ValueError(
            f"node {number}: {sum(node.mask)} sampled tokens, {len(node.turn.logprobs)} log-probabilities"
        )
    return node.turn.logprobs


def _joined(parts: Sequence[Sequence[int]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _content(path: Sequence[Node]) -> np.ndarray | None:
    """Content flags, where the renderer gave them for every token."""
    if any(len(node.content) != len(node.token_ids) for node in path):
        return None
    return _joined([node.content for node in path], np.uint8)


def _span(number: int, node: Node, start: int, stop: int, trained: np.ndarray) -> NodeSpan:
    where = np.flatnonzero(trained[start:stop])
    first = start + int(where[0]) if len(where) else -1
    return NodeSpan(number, start, stop, node.sampled, first, len(where))


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
    """Rows [length, layers, k] and how many of them, from the first on, are true; None when there are none."""
    turns = [(node.turn, int(stop)) for node, stop in zip(path, stops, strict=True) if node.turn is not None]
    found = [turn.rows for turn, _ in turns if turn.rows is not None and len(turn.rows)]
    if not found:
        return None, 0
    shapes = {rows.shape[1:] for rows in found}
    if len(shapes) > 1:
        raise ValueError(f"routing rows of different shapes in one branch: {sorted(shapes)}")
    out = np.zeros((length, *shapes.pop()), np.result_type(*found))
    known = np.zeros(length, bool)
    for turn, stop in turns:
        if turn.rows is None or turn.prompt_len + len(turn.logprobs) != stop:
            continue  # not the sequence that the engine saw: its rows belong to other tokens
        end = min(turn.rows_start + len(turn.rows), stop)
        out[turn.rows_start : end] = turn.rows[: end - turn.rows_start]
        known[turn.rows_start : end] = True
    if length > 1 and known[:-1].all() and not known[-1]:
        out[-1] = out[-2]
        known[-1] = True
    holes = np.flatnonzero(~known)
    routed = int(holes[0]) if len(holes) else length
    return (out, routed) if routed else (None, 0)


def _sampling(
    path: Sequence[Node], sampled: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> dict[str, np.ndarray]:
    """Kept sets: a count for every token, 0 where none was recorded, and the flat ids."""
    if all(node.turn is None or node.turn.mask_counts is None for node in path):
        return {}
    counts = np.zeros(len(sampled), np.int32)
    ids = [np.zeros(0, np.int32)]
    for node, start, stop in zip(path, starts, stops, strict=True):
        if node.turn is not None and node.turn.mask_counts is not None:
            counts[start:stop][sampled[start:stop]] = node.turn.mask_counts
            ids.append(np.asarray(node.turn.mask_ids, np.int32))
    return {"sampling_counts": counts, "sampling_ids": np.concatenate(ids)}


def _heads(
    path: Sequence[Node], trained: np.ndarray, sampled: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> dict[str, np.ndarray]:
    """Top-k heads of the trained tokens, padded with -1 and -inf; nothing when no trained token has one."""
    widths = [
        node.turn.head_ids.shape[1]
        for node in path
        if node.turn is not None and node.turn.head_ids is not None
    ]
    if not widths:
        return {}
    ids = np.full((len(trained), max(widths)), -1, np.int32)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    for node, start, stop in zip(path, starts, stops, strict=True):
        turn = node.turn
        if turn is not None and turn.head_ids is not None and turn.head_logprobs is not None:
            width = turn.head_ids.shape[1]
            where = start + np.flatnonzero(sampled[start:stop])
            ids[where, :width] = turn.head_ids
            logprobs[where, :width] = turn.head_logprobs
    return {"head_ids": ids[trained], "head_logprobs": logprobs[trained]}
