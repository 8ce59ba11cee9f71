from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moorage.orchestrator.credit import NodeCredit
from moorage.orchestrator.samples import make_samples, prune_zero
from moorage.records.payload import BranchPayload, NodeSpan, TracePayload
from moorage.records.sample import Span


def make_branch(index: int, spans: list[NodeSpan], **more) -> BranchPayload:
    total = spans[-1].stop
    defaults = {
        "fields": ("token_ids",),
        "routing": None,
        "nbytes": 10,
        "versions": (1, 2),
        "num_trainable": sum(span.num_trained for span in spans),
    }
    return BranchPayload(
        branch=index, id=f"b{index}", num_tokens=total, spans=tuple(spans), **{**defaults, **more}
    )


# Two turns that fork after the first answer: node 1 is shared, branch 0 trains it.
PROMPT = NodeSpan(0, 0, 4, False, -1, 0)
FIRST = NodeSpan(1, 4, 9, True, 5, 4)
FIRST_AS_CONTEXT = NodeSpan(1, 4, 9, True, -1, 0)
TOOL = NodeSpan(2, 9, 12, False, -1, 0)
LEFT = NodeSpan(3, 12, 16, True, 13, 3)
RIGHT = NodeSpan(4, 12, 20, True, 13, 7)
PAYLOAD = TracePayload(
    "u",
    "s",
    {},
    (make_branch(0, [PROMPT, FIRST, TOOL, LEFT]), make_branch(1, [PROMPT, FIRST_AS_CONTEXT, TOOL, RIGHT])),
)


def samples_of(credit, seq_len=100):
    return make_samples(PAYLOAD, credit, env="e", trace_id="t", temperature=0.5, seq_len=seq_len)


def test_a_shared_node_is_trained_by_the_first_branch_only():
    first, second = samples_of({at: NodeCredit(0.1 * at) for at in (1, 3, 4)})
    assert first.spans == (Span(5, 9, 0.1), Span(13, 16, 0.1 * 3))
    assert second.spans == (Span(13, 20, 0.4),)
    assert (first.payload.id, first.branch, first.temperature, first.versions) == ("b0", 0, 0.5, (1, 2))


def test_a_node_without_credit_gets_no_span_and_a_branch_without_spans_no_sample():
    (only,) = samples_of({4: NodeCredit(1.0)})
    assert only.branch == 1
    assert samples_of({}) == []


def test_zero_credit_is_a_span_of_its_own_kind():
    first, _ = samples_of({1: NodeCredit(0.0), 4: NodeCredit(1.0)})
    assert first.spans == (Span(5, 9, 0.0),)


def test_observations_are_trained_by_weight_once_in_the_first_branch():
    credit = {1: NodeCredit(0.5), 2: NodeCredit(None, 0.0, 0.1), 4: NodeCredit(0.5)}
    first, second = samples_of(credit)
    assert Span(9, 12, None, 0.0, 0.1) in first.spans
    assert second.spans == (Span(13, 20, 0.5),)


@given(seq_len=st.integers(1, 25))
def test_a_cut_keeps_whole_what_lies_below_it(seq_len):
    for sample in samples_of({at: NodeCredit(1.0) for at in (1, 3, 4)}, seq_len):
        assert sample.num_tokens == min(sample.payload.total_tokens, seq_len)
        assert all(0 <= span.start < span.stop <= sample.num_tokens for span in sample.spans)


def test_a_sample_whose_trained_tokens_are_all_cut_away_is_no_sample():
    assert samples_of({at: NodeCredit(1.0) for at in (1, 3, 4)}, seq_len=5) == []
    assert len(samples_of({at: NodeCredit(1.0) for at in (1, 3, 4)}, seq_len=6)) == 1


def test_pruning_drops_a_sample_with_nothing_but_zero_credit():
    first, second = samples_of({1: NodeCredit(0.0), 3: NodeCredit(0.0), 4: NodeCredit(0.3)})
    assert prune_zero(first) is None
    assert prune_zero(second) is second


def test_pruning_keeps_other_spans_and_other_losses():
    first, _ = samples_of({1: NodeCredit(0.0), 3: NodeCredit(0.2), 4: NodeCredit(1.0)})
    assert prune_zero(first).spans == (Span(13, 16, 0.2),)
    (echo, _) = samples_of({1: NodeCredit(0.0, 1.0, 0.1), 4: NodeCredit(1.0)})
    assert prune_zero(echo).spans == (Span(5, 9, 0.0, 0.0, 0.1),)


def test_pruning_leaves_unassigned_credit_alone():
    first, _ = samples_of({1: NodeCredit(None, 0.0, 1.0), 4: NodeCredit(1.0)})
    assert prune_zero(first) is first
