"""Measuring while training: which passes begin when a version is live, and what becomes of their figures.

A pass whose figures are in the metrics file is measured. One that an earlier attempt has begun at the version
that is live goes on with the episodes that are in its file; at another version it begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moorage.core.aio import TaskOwner
from moorage.core.rundir import RunDir
from moorage.monitor.fanout import Fanout
from moorage.monitor.files import read_metrics
from moorage.orchestrator.dispatcher import Dispatcher
from moorage.orchestrator.environments import Environment
from moorage.orchestrator.eval_sink import EvalSink
from moorage.orchestrator.holdings import Holdings
from moorage.orchestrator.results import Earlier, read_earlier, whole_sizes
from moorage.orchestrator.sources import EvalPass, EvalSchedule, Source


class Measuring:
    """Owns the eval sink. `on_end` is called when a pass is whole."""

    def __init__(
        self,
        run: RunDir,
        environments: Mapping[str, Environment],
        sizes: Mapping[str, int],
        schedule: EvalSchedule,
        measured: Mapping[str, int],
        holdings: Holdings,
        monitor: Fanout,
        owner: TaskOwner,
        *,
        on_end: Callable[[], None],
    ) -> None:
        """`sizes`: tasks of one pass, per source. `measured`: source to the version that an earlier attempt
        measured last; it may be asked for once more."""
        self.sink = EvalSink(holdings, on_pass=self._on_pass)
        self._run = run
        self._environments = environments
        self._sizes = sizes
        self._schedule = schedule
        self._measured = measured
        self._monitor = monitor
        self._owner = owner
        self._on_end = on_end

    def begin(self, dispatcher: Dispatcher, version: int) -> None:
        """`version` is live: begin what is due."""
        due = self._schedule.due(version)
        if not due:
            return
        again = [source.name for source in due if self._measured.get(source.name) == version]
        sizes = whole_sizes(self._environments.values())
        earlier = read_earlier(self._run, version, sizes, void=again)
        dispatcher.opener.slots.add([self._begin(source, version, earlier) for source in due])
        dispatcher.poke()

    def _begin(self, source: Source, version: int, earlier: Earlier) -> EvalPass:
        pass_ = earlier.continued(source, version, self._sizes[source.name])
        self.sink.begin(pass_, earlier.of(source.name))
        return pass_

    @property
    def is_whole(self) -> bool:
        """Whether no pass is under way."""
        return not self.sink.open_passes

    def _on_pass(self, pass_: EvalPass, metrics: dict[str, float]) -> None:
        self._monitor.log(metrics, pass_.version)
        client = self._environments[pass_.source.name].client
        self._owner.start(client.close_stream(pass_.stream), f"close {pass_.stream}")
        self._on_end()


def read_measured(run: RunDir, names: Iterable[str]) -> dict[str, int]:
    """Source to the newest version that is measured whole, as the metrics file of earlier attempts says."""
    rows = read_metrics(run.metrics("orchestrator"))
    measured = {}
    for name in names:
        key = f"eval/{name}/policy_version"
        if versions := [row[key] for row in rows if key in row]:
            measured[name] = int(max(versions))
    return measured
