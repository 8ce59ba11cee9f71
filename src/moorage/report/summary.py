"""`summary.json`: a run's end in one page, made from its metrics files and what the launcher saw.

Promises: every field of docs/protocols.md section 5 is there, null where the run never measured it. All rows
of a step count as one, the last writer of a name wins. Counts over the whole run are those of its last row.
What a resume does again is in no file any more (`launcher.resume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.core.rundir import RunDir
from moorage.monitor.files import read_metrics
from moorage.records.payload import HOLDERS, Ledger

Lines = dict[int, dict[str, Any]]
DROPPED = "episodes/dropped/"
TAIL_STEPS = 3


@dataclass(frozen=True)
class Facts:
    """What the launcher knows about an ending. A ledger is None for a server that did not answer."""

    status: str
    error: str | None = None
    wall_s: float = 0.0
    ledgers: Mapping[str, Ledger | None] = field(default_factory=dict)
    peak_rss_mib: Mapping[str, float] = field(default_factory=dict)


def make_summary(run: RunDir, facts: Facts) -> dict[str, Any]:
    """The content of summary.json."""
    orchestrator = by_step(read_metrics(run.metrics("orchestrator")))
    trainer = by_step(read_metrics(run.metrics("trainer")))
    rewards = _series(orchestrator, "reward/mean")
    steps = max(trainer, default=0)
    ledger = sum_ledgers(facts.ledgers)
    return {
        "status": facts.status,
        "error": facts.error,
        "steps": steps,
        "wall_s": round(facts.wall_s, 3),
        "step_s": _median(_series(trainer, "time/step")),
        "reward": [orchestrator.get(step, {}).get("reward/mean") for step in range(1, steps + 1)],
        "reward_first": rewards[0] if rewards else None,
        "reward_last": sum(rewards[-TAIL_STEPS:]) / len(rewards[-TAIL_STEPS:]) if rewards else None,
        "eval": _eval_table(orchestrator),
        "episodes": _episodes(orchestrator),
        "payload": _payload(ledger, trainer),
        "peak_rss_mib": {kind: round(mib, 1) for kind, mib in sorted(facts.peak_rss_mib.items())},
        "spool_peak_mib": None if ledger is None else round(ledger.peak_bytes / 2**20, 3),
        "mismatch_kl": _series(trainer, "mismatch_kl/mean"),
        "lag": _series(trainer, "policy/lag/mean"),
    }


def by_step(rows: Iterable[Mapping[str, Any]]) -> Lines:
    """Step to all that was written for it, ascending."""
    lines: Lines = {}
    for row in rows:
        lines.setdefault(row["step"], {}).update(row)
    return dict(sorted(lines.items()))


def sum_ledgers(ledgers: Mapping[str, Ledger | None]) -> Ledger | None:
    """The account of all stores; None when there is none, or when one of them is not known."""
    if not ledgers or any(ledger is None for ledger in ledgers.values()):
        return None
    total = Ledger()
    for ledger in ledgers.values():
        assert ledger is not None
        total = total.add(ledger)
    return total


def render_summary(summary: Mapping[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = [f"{summary['status']} after {summary['steps']} steps in {summary['wall_s']:.1f} s"]
    if summary["reward_first"] is not None:
        lines.append(f"reward    {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}")
    episodes = summary["episodes"]
    if episodes["started"] is not None:
        dropped = sum(episodes["dropped"].values())
        lines.append(
            f"episodes  {episodes['started']} started, {episodes['trained']} trained, {dropped} dropped, "
            f"{episodes['errored']} errored, {episodes['cancelled']} cancelled"
        )
    payload = summary["payload"]
    if payload is None:
        lines.append("payloads  unknown: an env server did not answer at the end")
    else:
        lines.append(
            f"payloads  {payload['kept']} kept, {sum(payload['freed'].values())} freed, "
            f"{payload['outstanding']} outstanding, {payload['double_frees']} double frees, "
            f"{payload['dropped_micro_batches']} dropped micro batches"
        )
    return "\n".join(lines)


def _series(lines: Lines, name: str) -> list[float]:
    return [line[name] for line in lines.values() if line.get(name) is not None]


def _median(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def _last(lines: Lines, name: str) -> Any | None:
    return next((line[name] for line in reversed(lines.values()) if line.get(name) is not None), None)


def _episodes(lines: Lines) -> dict[str, Any]:
    names = sorted({name for line in lines.values() for name in line if name.startswith(DROPPED)})
    counts: dict[str, Any] = {
        kind: _last(lines, f"episodes/{kind}") for kind in ("started", "trained", "errored", "cancelled")
    }
    counts["dropped"] = {name.removeprefix(DROPPED): _last(lines, name) for name in names}
    return counts


def _payload(ledger: Ledger | None, trainer: Lines) -> dict[str, Any] | None:
    if ledger is None:
        return None
    return {
        "kept": ledger.kept,
        "bytes": ledger.kept_bytes,
        "freed": {holder: ledger.freed.get(holder, 0) for holder in HOLDERS},
        "outstanding": ledger.outstanding,
        "double_frees": ledger.double_frees,
        "unknown": ledger.unknown,
        "dropped_micro_batches": round(sum(_series(trainer, "payload/dropped_micro_batches"))),
    }


def _eval_table(lines: Lines) -> dict[str, dict[str, dict[str, float]]]:
    """Env to step to figure, from the names `eval/<env>/...` of the orchestrator's metrics."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for step, line in lines.items():
        for name, value in line.items():
            parts = name.split("/", 2)
            if parts[0] == "eval" and len(parts) == 3:
                table.setdefault(parts[1], {}).setdefault(str(step), {})[parts[2]] = value
    return table
