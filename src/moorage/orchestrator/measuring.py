"""Measuring while training: which passes begin when a version is live, and what becomes of their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moorage.core.aio import TaskOwner
from moorage.monitor.fanout import Fanout
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.eval_sink import EvalSink
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.progress import OpenPass
from moorage.orchestrator.sources import EvalPass, EvalSchedule


class Measuring:
    """Owns the eval sink. `on_end` is called when a pass is whole."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        sizes: Mapping[str, int],
        schedule: EvalSchedule,
        holdings: Holdings,
        monitor: Fanout,
        owner: TaskOwner,
        *,
        on_end: Callable[[], None],
    ) -> None:
        """`sizes`: tasks of one pass, per source."""
        self.sink = EvalSink(holdings, on_pass=self._on_pass)
        self._environments = environments
        self._sizes = sizes
        self._schedule = schedule
        self._monitor = monitor
        self._owner = owner
        self._on_end = on_end

    def begin(self, dispatcher: Dispatcher, version: int) -> None:
        """`version` is live: begin what is due."""
        due = self._schedule.due(version)
        self._begin(dispatcher, [EvalPass(source, version, self._sizes[source.name]) for source in due])

    def resume(self, dispatcher: Dispatcher, version: int, open_passes: Sequence[OpenPass]) -> None:
        """Passes that an earlier attempt had not finished begin anew, at the version that is live now."""
        under_way = {(each.source.name, each.version) for each in self.sink.open_passes}
        names = {each.source for each in open_passes if each.source in self._environments}
        passes = [
            EvalPass(self._environments[name].source, version, self._sizes[name])
            for name in sorted(names)
            if (name, version) not in under_way
        ]
        self._begin(dispatcher, passes)

    @property
    def open_passes(self) -> tuple[OpenPass, ...]:
        """Passes that are not whole."""
        return tuple(OpenPass(each.source.name, each.version) for each in self.sink.open_passes)

    def _begin(self, dispatcher: Dispatcher, passes: Sequence[EvalPass]) -> None:
        for each in passes:
            self.sink.begin(each)
        dispatcher.opener.slots.add(passes)
        if passes:
            dispatcher.poke()

    def _on_pass(self, pass_: EvalPass, metrics: dict[str, float]) -> None:
        self._monitor.log(metrics, pass_.version)
        client = self._environments[pass_.source.name].client
        self._owner.start(client.close_stream(pass_.stream), f"close {pass_.stream}")
        self._on_end()
