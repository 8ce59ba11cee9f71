"""Dispatch facts on verifiers' own episodes: which env, which group, which work, which policy (R12, R15).

`stamp` is the one place that turns what a dispatcher knows into what an episode says; the `read_*` functions
are the only readers. The policy span comes from the engine's version labels, as `keep` noted them on the
traces; the oldest token decides. A frozen sampler has no span, and reads None.
"""

from __future__ import annotations

from typing import Literal

from verifiers.v1.episode import (
    Episode,
    EvalRunInfo,
    EvalWorkInfo,
    GroupInfo,
    PolicySpan,
    TrainRunInfo,
    TrainWorkInfo,
)

from moorage.env.keep import read_payload

Split = Literal["train", "eval"]


def stamp(
    episode: Episode,
    *,
    env_name: str,
    group_id: str | None,
    run_id: str,
    run_name: str | None = None,
    split: Split | None,
    step: int = 0,
    span: tuple[int, int] | None = None,
) -> None:
    """Write the facts of a dispatch on its episode.

    `split` None is a stand-alone evaluation. `step`: the batch window that was collecting when the episode
    arrived (R14). `span`: oldest and newest policy version of its tokens, None for a frozen sampler.
    """
    episode.env.name = env_name
    episode.group = None if group_id is None else GroupInfo(id=group_id)
    if split is None:
        episode.record_run(EvalRunInfo(id=run_id, name=run_name))
        return
    policy = None if span is None else PolicySpan(start=span[0], end=span[1])
    work = (
        TrainWorkInfo(step=step, policy=policy)
        if split == "train"
        else EvalWorkInfo(step=step, policy=policy)
    )
    episode.record_run(TrainRunInfo(id=run_id, name=run_name, work=work))


def read_env(episode: Episode) -> str:
    """The name that the run gives to the episode's env."""
    if episode.env.name is None:
        raise ValueError(f"episode {episode.id} was never stamped")
    return episode.env.name


def read_group(episode: Episode) -> str | None:
    """Id of the episode's group."""
    return None if episode.group is None else episode.group.id


def read_split(episode: Episode) -> Split | None:
    """`train` or `eval`; None outside a training run."""
    return episode.run.work.type if isinstance(episode.run, TrainRunInfo) else None


def read_step(episode: Episode) -> int | None:
    """The step that the episode worked for; None outside a training run."""
    return episode.run.work.step if isinstance(episode.run, TrainRunInfo) else None


def read_span(episode: Episode) -> tuple[int, int] | None:
    """Oldest and newest policy version, None for a frozen sampler or when never stamped."""
    policy = episode.run.work.policy if isinstance(episode.run, TrainRunInfo) else None
    return None if policy is None else (policy.start, policy.end)


def measure_span(episode: Episode) -> tuple[int, int] | None:
    """Oldest and newest version over everything the episode's payloads name, None when none is named."""
    payloads = [payload for trace in episode.traces if (payload := read_payload(trace)) is not None]
    named = [
        branch.versions for payload in payloads for branch in payload.branches if branch.versions is not None
    ]
    return (min(low for low, _ in named), max(high for _, high in named)) if named else None


def measure_lag(episode: Episode, version: int) -> int | None:
    """Versions by which the episode's oldest token is behind `version`; None without a span."""
    span = read_span(episode)
    return None if span is None else version - span[0]


def measure_drift(episode: Episode) -> int | None:
    """Versions that passed while the episode was generated; None without a span."""
    span = read_span(episode)
    return None if span is None else span[1] - span[0]
