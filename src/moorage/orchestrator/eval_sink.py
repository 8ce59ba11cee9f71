"""Measurements: collects the episodes of each eval pass and scores the pass when it is whole.

Promises: every payload of an eval episode is released at once, as `eval_sink`; a pass is reported once, when
each of its groups has all its episodes, arrived or cancelled; errored episodes count as episodes. Needs no
trace to know where an episode belongs: the group says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moorage.core.log import get_logger
from moorage.orchestrator.events import Arrived, Cancelled, Event
from moorage.orchestrator.facts import EpisodeFacts, only, read_episode
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.metrics import agent_metrics, episode_metrics, pass_metrics
from moorage.orchestrator.payloads import span_of
from moorage.orchestrator.sources import EvalPass

log = get_logger(__name__)


@dataclass
class PassState:
    """A pass under way. `done` maps group id to episodes that are final."""

    pass_: EvalPass
    done: dict[str, int] = field(default_factory=dict)
    episodes: list[EpisodeFacts] = field(default_factory=list)

    @property
    def num_groups_done(self) -> int:
        return sum(count >= self.pass_.source.group_size for count in self.done.values())

    @property
    def is_whole(self) -> bool:
        return self.num_groups_done >= self.pass_.num_tasks


class EvalSink:
    """One per orchestrator. `on_pass(pass, metrics)` is called once per pass."""

    def __init__(self, holdings: Holdings, *, on_pass: Callable[[EvalPass, dict[str, float]], None]) -> None:
        self._holdings = holdings
        self._on_pass = on_pass
        self._passes: dict[tuple[str, int], PassState] = {}

    def begin(self, pass_: EvalPass, episodes: list[EpisodeFacts] | None = None) -> None:
        """Expect the episodes of a pass. `episodes`: those that an interrupted measurement had already."""
        state = self._passes[pass_.source.name, pass_.version] = PassState(pass_)
        for facts in episodes or []:
            state.episodes.append(facts)
            state.done[facts.group_id] = state.done.get(facts.group_id, 0) + 1
        self._end_if_whole(state)

    def _end_if_whole(self, state: PassState) -> None:
        if state.is_whole:
            del self._passes[state.pass_.source.name, state.pass_.version]
            self._on_pass(state.pass_, score_pass(state.pass_, state.episodes))

    @property
    def open_passes(self) -> list[EvalPass]:
        """Passes that are not whole yet."""
        return [state.pass_ for state in self._passes.values()]

    def add(self, event: Event) -> EpisodeFacts | None:
        """Take one event; the facts of the episode when it was one."""
        key = (event.group.source, event.group.step)
        state = self._passes.get(key)
        if isinstance(event, Arrived):
            self._holdings.hand_over(event.payloads, "dispatcher", "eval_sink")
            self._holdings.release(event.payloads, "eval_sink")
        if state is None:
            raise ValueError(f"an episode of {key} belongs to no eval pass")
        facts = self._read(event)
        state.episodes += facts
        state.done[event.group.id] = state.done.get(event.group.id, 0) + len(facts)
        self._end_if_whole(state)
        return facts[0] if isinstance(event, Arrived) else None

    def _read(self, event: Event) -> list[EpisodeFacts]:
        group = event.group
        if isinstance(event, Cancelled):
            return [
                EpisodeFacts(f"{group.id}/{at}", group.source, group.id, False, (), cancelled=True)
                for at in range(event.cancellation.count)
            ]
        span = span_of(event.payloads.values())
        return [
            read_episode(
                event.episode, env=group.source, group_id=group.id, span=span, payloads=event.payloads
            )
        ]


def score_pass(pass_: EvalPass, episodes: list[EpisodeFacts]) -> dict[str, float]:
    """All series of a whole pass, and a warning when it says nothing about the policy."""
    scope = f"eval/{pass_.source.name}"
    size = pass_.source.group_size
    effective = [only(each, lambda trace: trace.ok and trace.trainable) for each in episodes if each.ok]
    effective = [each for each in effective if each.traces]
    values = episode_metrics(scope, "all", episodes) | episode_metrics(scope, "effective", effective)
    values |= agent_metrics(scope, "all", episodes) | agent_metrics(scope, "effective", effective)
    for subset, chosen in (("all", episodes), ("effective", effective)):
        by_agent = group_rewards(chosen)
        for agent, groups in by_agent.items():
            values |= pass_metrics(f"{scope}/{subset}/{agent}", groups, size, binary=subset == "effective")
    flat = group_rewards(effective, by_agent=False).get("", {})
    values |= pass_metrics(scope, flat, size, binary=True)
    values[f"{scope}/policy_version"] = pass_.version
    values[f"{scope}/num_episodes"] = len(episodes)
    values[f"{scope}/num_scored"] = sum(len(rewards) for rewards in flat.values())
    values[f"{scope}/num_errored"] = sum(not each.ok and not each.cancelled for each in episodes)
    values[f"{scope}/num_cancelled"] = sum(each.cancelled for each in episodes)
    drifts = [each.span[1] - each.span[0] for each in episodes if each.span is not None]
    values[f"{scope}/drift/max"] = max(drifts, default=0)
    rewards = [reward for group in flat.values() for reward in group]
    if not any(rewards):
        what = "every reward is 0" if rewards else "nothing was scored"
        log.warning(
            "eval of %s at version %d: %s; is the grader right?", pass_.source.name, pass_.version, what
        )
    return values


def group_rewards(
    episodes: list[EpisodeFacts], *, by_agent: bool = True
) -> Mapping[str, dict[str, list[float]]]:
    """Agent (or "") to group id to the rewards of scored traces."""
    table: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        for trace in episode.traces:
            if trace.reward is not None:
                groups = table.setdefault(trace.agent if by_agent else "", {})
                groups.setdefault(episode.group_id, []).append(trace.reward)
    return table
