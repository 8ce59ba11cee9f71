"""Runs a plan on this machine: starts everything, shows progress, decides about deaths, stops in order.

The one loop, in the main thread, polls every `POLL_S`:

    what it sees                    what it does
    orchestrator and trainer done   END.json (finished), ordered stop
    a death that ends the run       END.json (failed), its last error, ordered stop, exit code 1
    Ctrl-C, SIGTERM, SIGHUP         END.json (cancelled), ordered stop, exit code 130, 143 or 129
    a second Ctrl-C                 kills at once

Ordered stop: orchestrator, trainer, `bye` to every env server, env servers, engines; each has a deadline, all
together less than 30 s. Then whatever is left of the attempt is killed, and its spools are removed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage.core.rundir import Heartbeat, RunDir, whole_checkpoints, write_end
from moorage.exchange.batches import read_owned_slices
from moorage.launcher import children as processes
from moorage.launcher.children import Child
from moorage.launcher.farewell import Identity, Station, read_stations, say_bye
from moorage.launcher.plan import STOP_ORDER, Death, Plan, ProcessRecord, decide, first_cause
from moorage.launcher.progress import Progress
from moorage.records.payload import Ledger

POLL_S = 0.05
SHOW_S = 0.25
SAMPLE_S = 1.0
STOP_S = {"orchestrator": 6.0, "trainer": 6.0, "env_server": 5.0, "inference": 4.0}
BYE_S = 4.0


@dataclass
class Outcome:
    """How an attempt ended. `ledgers` has every payload store of the attempt, None for an unknown account."""

    status: str = "failed"
    error: str | None = "the launcher failed"
    exit_code: int = 1
    wall_s: float = 0.0
    ledgers: dict[str, Ledger | None] = field(default_factory=dict)
    peak_rss_mib: dict[str, float] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)


class LocalRun:
    """One attempt on this machine."""

    def __init__(self, plan: Plan, token: str, progress: Progress) -> None:
        self.plan = plan
        self.token = token
        self.progress = progress
        self.outcome = Outcome()
        self._say = progress.display.say
        self._running: list[Child] = []
        self._started: list[Child] = []
        self._restarts: dict[str, list[float]] = {}
        self._signals: list[int] = []

    def run(self) -> Outcome:
        """Start, watch until the end, stop. Raises nothing that a process of the run causes."""
        began = time.monotonic()
        with _signals_to(self._signals), Heartbeat(self.plan.run, "launcher"):
            try:
                for record in self.plan.records:
                    self._start(record)
                self._watch()
            finally:
                self._finish()
                self.outcome.wall_s = time.monotonic() - began
        return self.outcome

    # --- watching ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return when the run has ended, with `outcome` saying how."""
        next_show = next_sample = 0.0
        while True:
            now = time.monotonic()
            if self._signals:
                return self._end_by_signal()
            if self._act_on_deaths(now):
                return None
            if not any(child.record.ends_well for child in self._running):
                return self._end("finished", None, 0)
            if now >= next_sample:
                self._sample_memory()
                next_sample = now + SAMPLE_S
            if now >= next_show:
                self.progress.update()
                next_show = now + SHOW_S
            time.sleep(POLL_S)

    def _act_on_deaths(self, now: float) -> bool:
        """Carry out what the plan says about processes that have ended. True when the run ends by it."""
        deaths = [(child, code) for child in self._running if (code := child.poll()) is not None]
        if not deaths:
            return False
        dead = [child for child, _ in deaths]
        self._running = [child for child in self._running if child not in dead]
        living = [child.record for child in self._running]
        fatal: list[Death] = []
        for child, code in deaths:
            death = Death(child.record, code)
            history = self._restarts.setdefault(child.record.name, [])
            action = decide(death, living=living, restarts=history, now=now)
            child.kill_session()
            if action == "end_run":
                fatal.append(death)
            elif action == "restart":
                history.append(now)
                self._say(f"{death.wording}; starting it again")
                self._start(child.record)
            elif action == "go_on":
                self._say(f"{death.wording}; the run goes on with the others of {child.record.group}")
        if fatal:
            self._end_by_death(first_cause(fatal))
        return bool(fatal)

    def _end_by_death(self, death: Death) -> None:
        line = processes.error_line(death.record.log)
        self._end("failed", f"{death.wording}: {line}" if line else death.wording, 1)
        self._say(f"\n{death.wording}. The end of {death.record.log}:\n")
        self._say(processes.last_error(death.record.log))

    def _end_by_signal(self) -> None:
        name = "Ctrl-C" if self._signals[0] == signal.SIGINT else signal.Signals(self._signals[0]).name
        self._end("cancelled", f"stopped by {name}", 128 + self._signals[0])
        self._say(f"{name}: stopping in order (Ctrl-C again kills at once)")

    def _end(self, status: str, error: str | None, exit_code: int) -> None:
        self.outcome.status, self.outcome.error, self.outcome.exit_code = status, error, exit_code
        write_end(self.plan.run, status, error)

    def _sample_memory(self) -> None:
        peaks = self.outcome.peak_rss_mib
        for kind, mib in processes.resident_mib(self._running, own_kind="launcher").items():
            peaks[kind] = max(peaks.get(kind, 0.0), mib)

    # --- starting and stopping ---------------------------------------------------------------------------

    def _start(self, record: ProcessRecord) -> None:
        child = processes.start(record, self.token)
        self._running.append(child)
        self._started.append(child)

    def _finish(self) -> None:
        """The ordered stop, whatever state the run is in, and whether or not its folder can be written."""
        try:
            write_end(self.plan.run, self.outcome.status, self.outcome.error)
        finally:
            try:
                self._stop_in_order()
            finally:
                self.outcome.left = processes.kill_everything(self._started)
        self.progress.update()

    def _stop_in_order(self) -> None:
        stations = read_stations(self.plan.run)
        stations += [Station(source, source, address) for source, address in self.plan.external]
        for kind in STOP_ORDER:
            if kind == "env_server":
                self._say_bye(stations)
            processes.stop(self._of_kind(kind), STOP_S[kind], self._hurry)
        processes.kill_everything(self._started)  # what an env server started may still use its spool
        for station in stations:
            remove_spool(station, self.plan.run_id)

    def _say_bye(self, stations: list[Station]) -> None:
        identity = Identity(self.token, self.plan.run_id, self.plan.attempt)
        timeout_s = 0.0 if self._hurry() else BYE_S
        retain = list_retained(self.plan.run) if self.plan.retains else ()
        answers = say_bye(stations, identity, retain=retain, timeout_s=timeout_s)
        self.outcome.ledgers = {**dict.fromkeys(self.plan.stores, None), **answers}

    def _of_kind(self, kind: str) -> list[Child]:
        return [child for child in self._running if child.record.kind == kind]

    def _hurry(self) -> bool:
        return len(self._signals) > 1


def list_retained(run: RunDir) -> list[str]:
    """Payloads of the batches behind the newest whole checkpoint: a resumed attempt trains on them again."""
    covered = whole_checkpoints(run)[-1:] or [0]
    return [payload.id for payload in read_owned_slices(run, covered[0] + 1)]


def remove_spool(station: Station, run_id: str) -> None:
    """Remove the attempt's spool that an env server has published. Only a folder named after the run goes."""
    if station.spool is None or not any(run_id in part for part in Path(station.spool).parts):
        return
    folder = Path(station.spool)
    shutil.rmtree(folder, ignore_errors=True)
    while run_id not in folder.name:  # the folders above it, up to the run's own, once they are empty
        folder = folder.parent
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _signals_to(received: list[int]) -> Iterator[None]:
    """Collect SIGINT, SIGTERM and SIGHUP in `received` instead of being ended by them. A SIGHUP that is
    ignored (nohup) stays so."""

    def note(number: int, _frame: Any) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
