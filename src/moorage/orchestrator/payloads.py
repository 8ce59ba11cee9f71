"""What a trace's payload record says, for those who only count and name. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.records.payload import PayloadRef, TracePayload


def payload_refs(payload: TracePayload | None) -> list[PayloadRef]:
    """What must be released of one trace."""
    if payload is None:
        return []
    return [PayloadRef(payload.url, payload.store, branch.id) for branch in payload.branches]


def oldest_version(payload: TracePayload | None) -> int | None:
    """Version of the oldest token that the trace trains, None when the engine named none."""
    span = span_of([payload] if payload is not None else [])
    return None if span is None else span[0]


def span_of(payloads: Iterable[TracePayload | None]) -> tuple[int, int] | None:
    """Oldest and newest policy version over the branches of `payloads`, None when none is named."""
    named = [
        branch.versions
        for payload in payloads
        if payload is not None
        for branch in payload.branches
        if branch.versions is not None
    ]
    return (min(low for low, _ in named), max(high for _, high in named)) if named else None
