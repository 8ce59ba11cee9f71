"""Which tokens train, on random graphs: every policy token once, spans that match, whole routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.env.branches import Node, build_branch, plan_branches, read_streams
from moorage.env.turns import Turn
from moorage.payload.codec import BranchArrays, decode, encode


@dataclass(frozen=True)
class Graph:
    """A random trace: nodes, their parents, and (index, path, trainable) for each branch."""

    nodes: list[Node]
    parents: list[int | None]
    paths: list[tuple[int, tuple[int, ...], bool]]


def make_turn(rng: np.random.Generator, prompt_len: int, n: int, start: int, kind: dict) -> Turn:
    rows = rng.integers(0, 8, (prompt_len - start + n - 1, 2, 3)).astype(np.uint8) if kind["rows"] else None
    counts = rng.integers(0, 4, n).astype(np.int32) if kind["masks"] else None
    logprobs = -rng.random(n).astype(np.float32)
    logprobs[rng.random(n) < kind["void"]] = np.nan
    return Turn(
        prompt_len=prompt_len,
        logprobs=logprobs,
        versions=((int(rng.integers(0, 5)), 0, n),),
        policy=bool(rng.random() < kind["policy"]),
        rows=rows,
        rows_start=start,
        mask_counts=counts,
        mask_ids=None if counts is None else rng.integers(0, 90, counts.sum()).astype(np.int32),
        head_ids=rng.integers(0, 90, (n, 2)).astype(np.int32) if kind["heads"] else None,
        head_logprobs=-rng.random((n, 2)).astype(np.float32) if kind["heads"] else None,
    )


@st.composite
def graphs(draw: st.DrawFn, *, rows: bool | None = None) -> Graph:
    """Trees of messages: prompts fork and are continued; each leaf is a branch, some of them untrainable."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = {
        "rows": draw(st.booleans()) if rows is None else rows,
        "masks": draw(st.booleans()),
        "heads": draw(st.booleans()),
        "void": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "policy": draw(st.sampled_from([1.0, 1.0, 0.6])),
    }
    nodes: list[Node] = []
    parents: list[int | None] = []
    for number in range(draw(st.integers(1, 12))):
        parent = None if number == 0 else draw(st.integers(0, number - 1) | st.just(number - 1))
        parents.append(parent)
        nodes.append(_random_node(rng, nodes, parents, kind))
    leaves = [n for n in range(len(nodes)) if n not in parents]
    paths = [(i, _path(parents, leaf), bool(rng.random() < 0.8)) for i, leaf in enumerate(leaves)]
    return Graph(nodes, parents, paths)


def _random_node(rng: np.random.Generator, nodes: list[Node], parents: list[int | None], kind: dict) -> Node:
    before = _path(parents, len(nodes))[:-1]
    length = sum(len(nodes[n].token_ids) for n in before)
    if rng.random() < 0.5:
        size = int(rng.integers(1, 5))
        return Node(rng.integers(0, 90, size).tolist(), [False] * size)
    scaffold, n = int(rng.integers(1, 3)), int(rng.integers(1, 6))
    calls = [t for m in before if (t := nodes[m].turn) is not None]
    start = calls[-1].routed_to if calls and rng.random() < 0.8 else 0
    turn = make_turn(rng, length + scaffold, n, start, kind)
    return Node(
        rng.integers(0, 90, scaffold + n).tolist(), [False] * scaffold + [True] * n, sampled=True, turn=turn
    )


def _path(parents: list[int | None], leaf: int) -> tuple[int, ...]:
    path, at = [], leaf
    while at is not None:
        path.append(at)
        at = parents[at]  # type: ignore[assignment]
    return tuple(reversed(path))


def built(graph: Graph):
    plans = plan_branches(graph.nodes, [(i, path) for i, path, trainable in graph.paths if trainable])
    return [(plan, branch) for plan in plans if (branch := build_branch(graph.nodes, plan)) is not None]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_every_usable_policy_token_trains_in_exactly_the_first_trainable_branch(graph: Graph) -> None:
    trained: dict[tuple[int, int], int] = {}
    for plan, branch in built(graph):
        for span in branch.spans:
            for offset in np.flatnonzero(branch.arrays.loss_mask[span.start : span.stop]):
                assert (span.node, int(offset)) not in trained
                trained[span.node, int(offset)] = plan.index
    for number, node in enumerate(graph.nodes):
        holders = [i for i, path, trainable in graph.paths if trainable and number in path]
        wanted = bool(holders) and node.turn is not None and node.turn.policy
        usable = np.isfinite(node.turn.logprobs) if node.turn is not None else np.zeros(0, bool)
        offsets = np.flatnonzero(node.mask)
        for offset, is_usable in zip(offsets, usable, strict=False):
            expected = holders[0] if wanted and is_usable else None
            assert trained.get((number, int(offset))) == expected


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_spans_tile_the_tokens_and_tell_what_is_trained(graph: Graph) -> None:
    for plan, branch in built(graph):
        arrays = branch.arrays
        assert [span.node for span in branch.spans] == list(plan.path[: len(branch.spans)])
        assert [span.start for span in branch.spans[1:]] == [span.stop for span in branch.spans[:-1]]
        assert branch.spans[0].start == 0
        assert branch.spans[-1].stop == arrays.num_tokens
        for span in branch.spans:
            where = np.flatnonzero(arrays.loss_mask[span.start : span.stop])
            assert span.num_trained == len(where)
            assert span.first_trained == (span.start + where[0] if len(where) else -1)
            assert arrays.token_ids[span.start : span.stop].tolist() == graph.nodes[span.node].token_ids


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_a_blob_gives_back_the_arrays_byte_for_byte(graph: Graph) -> None:
    for _, branch in built(graph):
        back = decode(b"".join(bytes(part) for part in encode(branch.arrays)))
        for name, array in branch.arrays.present().items():
            other = getattr(back, name)
            assert other.dtype == array.dtype
            assert other.tobytes() == np.ascontiguousarray(array).tobytes()
            assert other.shape == array.shape


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_optional_arrays_belong_to_the_tokens_that_were_sampled(graph: Graph) -> None:
    for plan, branch in built(graph):
        arrays, streams = branch.arrays, read_streams(graph.nodes, plan.path)
        assert np.isfinite(arrays.logprobs).all()
        if arrays.sampling_counts is not None:
            assert not arrays.sampling_counts[~streams.sampled[: arrays.num_tokens]].any()
        if arrays.head_ids is not None:
            _check_heads(graph, branch.spans, arrays)


def _check_heads(graph: Graph, spans, arrays: BranchArrays) -> None:
    row = 0
    assert arrays.head_ids is not None
    for span in spans:
        node = graph.nodes[span.node]
        for offset in np.flatnonzero(arrays.loss_mask[span.start : span.stop]):
            assert node.turn is not None
            assert node.turn.head_ids is not None
            place = sum(node.mask[:offset])
            assert arrays.head_ids[row].tolist() == node.turn.head_ids[place].tolist()
            row += 1
    assert row == len(arrays.head_ids)


@given(graphs(rows=True))
@settings(max_examples=100, deadline=None)
def test_routing_rows_are_the_engines_and_whole(graph: Graph) -> None:
    for plan, branch in built(graph):
        rows = branch.arrays.routed_experts
        assert rows is not None
        expected: dict[int, list] = {}
        for number in plan.path:
            turn = graph.nodes[number].turn
            if turn is not None and turn.rows is not None:
                expected.update({turn.rows_start + i: row.tolist() for i, row in enumerate(turn.rows)})
        known = max(expected) + 1
        assert len(rows) == known + 1  # no call saw what comes after the last sampled token
        assert [row.tolist() for row in rows[:-1]] == [expected[i] for i in range(known)]
        assert rows[-1].tolist() == rows[-2].tolist()


def chain(*nodes: Node):
    [plan] = plan_branches(nodes, [(0, tuple(range(len(nodes))))])
    return build_branch(nodes, plan)


def prompt(n: int) -> Node:
    return Node([1] * n, [False] * n)


def answer(prompt_len: int, n: int, *, rows: int | None = None, start: int = 0, **fields) -> Node:
    given_rows = None if rows is None else np.arange(rows * 2, dtype=np.uint8).reshape(rows, 1, 2)
    turn = Turn(prompt_len, np.full(n, -0.5, np.float32), rows=given_rows, rows_start=start, **fields)
    return Node([2] * n, [True] * n, sampled=True, turn=turn)


def test_a_branch_is_cut_at_the_first_hole_in_its_routing_rows() -> None:
    branch = chain(prompt(3), answer(3, 4, rows=6), prompt(2), answer(9, 3))
    assert branch is not None
    assert branch.arrays.num_tokens == 7  # the seventh needs no row: what it predicts is cut off
    assert branch.num_cut == 5
    assert branch.arrays.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert [(s.node, s.start, s.stop, s.num_trained) for s in branch.spans] == [(0, 0, 3, 0), (1, 3, 7, 4)]


def test_rows_for_another_sequence_are_not_used() -> None:
    branch = chain(prompt(3), answer(5, 4, rows=8))
    assert branch is not None
    assert branch.arrays.routed_experts is None


def test_rows_of_two_shapes_are_refused() -> None:
    odd = answer(3, 2, rows=4)
    other = Turn(5, np.zeros(2, np.float32), rows=np.zeros((2, 3, 3), np.uint8), rows_start=4)
    with pytest.raises(ValueError, match="different shapes"):
        chain(prompt(3), odd, Node([2, 2], [True, True], sampled=True, turn=other))


def test_ids_above_255_widen_the_rows_of_the_whole_branch() -> None:
    late = answer(6, 2, start=4, rows=3)
    assert late.turn is not None
    wide = Turn(6, late.turn.logprobs, rows=np.full((3, 1, 2), 300, np.uint16), rows_start=4)
    branch = chain(
        prompt(3), answer(3, 2, rows=4), prompt(1), Node([2, 2], [True, True], sampled=True, turn=wide)
    )
    assert branch is not None
    assert branch.arrays.routed_experts is not None
    assert branch.arrays.routed_experts.dtype == np.uint16
    assert branch.arrays.routed_experts[:, 0, 0].tolist() == [0, 2, 4, 6, 300, 300, 300, 300]


def test_an_unusable_logprob_leaves_its_token_untrained_and_is_counted() -> None:
    node = answer(2, 3)
    assert node.turn is not None
    node.turn.logprobs[1] = np.nan
    branch = chain(prompt(2), node)
    assert branch is not None
    assert branch.unusable == 1
    assert branch.arrays.loss_mask.tolist() == [0, 0, 1, 0, 1]


def test_a_branch_with_no_usable_token_is_left_out() -> None:
    node = answer(2, 1)
    assert node.turn is not None
    node.turn.logprobs[0] = np.nan
    assert chain(prompt(2), node) is None


def test_arrays_that_do_not_fit_their_node_are_refused_with_its_number() -> None:
    bad = Node([2, 2, 2], [True, True, True], sampled=True, turn=Turn(2, np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match="node 1 has 3 sampled tokens and 2 log-probabilities"):
        chain(prompt(2), bad)


def test_versions_span_the_oldest_and_the_newest_token() -> None:
    branch = chain(
        prompt(1), answer(1, 2, versions=((4, 0, 1), (5, 1, 2))), answer(3, 1, versions=((None, 0, 1),))
    )
    assert branch is not None
    assert branch.versions == (4, 5)
    unlabelled = chain(prompt(1), answer(1, 2, versions=((None, 0, 2),)))
    assert unlabelled is not None
    assert unlabelled.versions is None
