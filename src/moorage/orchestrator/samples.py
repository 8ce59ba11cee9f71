"""From a trace's payload record and its credit to training samples. Pure.

One sample per kept branch, in branch order: a reference, and a span of credit for each node that the branch
trains. The worker decided already which branch trains a shared node (the first one that holds it); a later
branch carries the node as context. Nodes that a model did not sample are trained only by `ce` weight (ECHO),
again in the first branch that holds them.

Does not know verifiers; works on records alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from moorage.core.errors import ConfigError
from moorage.orchestrator.credit import NodeCredit
from moorage.records.packing import cut_sample
from moorage.records.payload import BranchPayload, NodeSpan, PayloadSlice, TracePayload
from moorage.records.sample import Span, TrainSample


def make_samples(
    payload: TracePayload,
    credit: Mapping[int, NodeCredit],
    *,
    env: str,
    trace_id: str,
    temperature: float,
    seq_len: int,
) -> list[TrainSample]:
    """The samples of one trace, cut to `seq_len`. A branch whose spans are all empty gives no sample."""
    samples: list[TrainSample] = []
    observed: set[int] = set()
    for branch in payload.branches:
        spans = tuple(span for node in branch.spans if (span := _span(node, credit, observed)) is not None)
        if not spans:
            continue
        sample = TrainSample(
            payload=make_slice(payload, branch),
            spans=spans,
            env=env,
            temperature=temperature,
            trace_id=trace_id,
            branch=branch.branch,
            versions=branch.versions,
        )
        cut = cut_sample(sample, seq_len)
        if cut.spans:
            samples.append(cut)
    return samples


def check_arrays(sample: TrainSample, *, routing: bool, kept_sets: bool) -> None:
    """Refuse a sample without the arrays that its training needs: rows of a replayed router, kept sets of
    truncated sampling. Raises ConfigError with the remedy."""
    where = f"trace {sample.trace_id} of source `{sample.env}` came without"
    if routing and sample.payload.routing is None:
        raise ConfigError(
            f"trainer.router_replay is on, but {where} routing rows: set inference.routed_experts = true on "
            "every engine, or trainer.router_replay = false"
        )
    learns_from_samples = any(span.rl for span in sample.spans)
    if kept_sets and learns_from_samples and "sampling_counts" not in sample.payload.fields:
        raise ConfigError(
            f"sampling is truncated, but {where} kept sets: the trainer could not compare log-probabilities; "
            "set inference.sampling_mask = true on every engine, or take top_k, top_p and min_p out of the "
            "source's sampling"
        )


def make_slice(payload: TracePayload, branch: BranchPayload) -> PayloadSlice:
    """The whole blob of a branch, as everybody else names it."""
    return PayloadSlice(
        url=payload.url,
        store=payload.store,
        id=branch.id,
        num_tokens=branch.num_tokens,
        total_tokens=branch.num_tokens,
        fields=branch.fields,
        routing=branch.routing,
        nbytes=branch.nbytes,
    )


def prune_zero(sample: TrainSample) -> TrainSample | None:
    """`sample` without rl weight where the advantage is exactly 0; None when nothing trains any more.

    A sample without such spans is returned as it is, also when its advantages are unassigned.
    """
    if not any(span.advantage == 0.0 and span.rl for span in sample.spans):
        return sample
    spans = []
    for span in sample.spans:
        if span.advantage != 0.0:
            spans.append(span)
        elif span.ce or span.ref_kl:
            spans.append(Span(span.start, span.stop, span.advantage, 0.0, span.ce, span.ref_kl))
    if not spans:
        return None
    return TrainSample(
        sample.payload,
        tuple(spans),
        sample.env,
        sample.temperature,
        sample.trace_id,
        sample.branch,
        sample.versions,
    )


def _span(node: NodeSpan, credit: Mapping[int, NodeCredit], observed: set[int]) -> Span | None:
    given = credit.get(node.node)
    if given is None or node.stop <= node.start:
        return None
    if not node.sampled:
        if not given.ce or node.node in observed:
            return None
        observed.add(node.node)
        return Span(node.start, node.stop, None, 0.0, given.ce, 0.0)
    if node.num_trained < 1:
        return None
    return Span(node.first_trained, node.stop, given.advantage, given.rl, given.ce, given.ref_kl)
