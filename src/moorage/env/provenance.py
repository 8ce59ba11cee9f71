"""Dispatch facts on verifiers' own episodes: which env, which group, which work, which policy (R12, R15).

`stamp` is the one place that turns what a dispatcher knows into what an episode says. The policy span comes
from the engine's version labels, as `keep` noted them on the traces; a frozen sampler has none.
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
