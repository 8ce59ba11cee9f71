"""Which processes a run has, as data: command line, environment, log file, what a death of each means.

Pure: it is given ports, ids and devices, and returns records and the config files that they read. `decide`
says what the launcher does about a process that has ended.

    kind           command line                     exit 0      on_death
    inference      moorage inference @ ...          a death     end_run
    env_server     moorage env-server @ ...         a death     end_run; go_on when its source has replicas
    orchestrator   moorage orchestrator @ ...       its end     end_run
    trainer        moorage trainer @ ...            its end     end_run
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moorage.config.derive import sources_by_split
from moorage.config.run import DerivedConfigs
from moorage.core.net import node_name
from moorage.core.rundir import RunDir

OnDeath = Literal["end_run", "restart", "go_on"]
KINDS = ("inference", "env_server", "orchestrator", "trainer")
STOP_ORDER = ("orchestrator", "trainer", "env_server", "inference")
MAX_RESTARTS, RESTART_WINDOW_S = 2, 60.0


@dataclass(frozen=True)
class ProcessRecord:
    """One process of a run. `ends_well`: exit code 0 is its proper end. `group`: who can stand in for it."""

    name: str
    kind: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    on_death: OnDeath = "end_run"
    ends_well: bool = False
    group: str = ""


@dataclass(frozen=True)
class Plan:
    """All processes of one attempt, in the order in which they are started, and their config files.

    `external`: source (`<split>/<name>`) and RPC address of env servers that somebody else runs. `retains`:
    payloads of batches that no whole checkpoint covers outlive the attempt.
    """

    run: RunDir
    run_id: str
    attempt: int
    max_steps: int
    records: tuple[ProcessRecord, ...]
    configs: Mapping[Path, Any]
    start_step: int = 1
    external: tuple[tuple[str, str], ...] = ()
    retains: bool = False

    @property
    def stores(self) -> tuple[str, ...]:
        """`<split>/<name>.<node>` of the payload store of every env server that is started."""
        servers = (record for record in self.records if record.kind == "env_server")
        return tuple(record.name.removeprefix("envs/") for record in servers)


@dataclass(frozen=True)
class Devices:
    """CUDA devices by index, None where a process keeps what it inherits."""

    engines: tuple[tuple[int, ...] | None, ...] = ()
    trainer: tuple[int, ...] | None = None


def make_plan(
    derived: DerivedConfigs,
    *,
    python: str = sys.executable,
    devices: Devices = Devices(),
    rendezvous_port: int = 0,
) -> Plan:
    """The plan of one attempt on this machine. `rendezvous_port`: where more than one trainer rank meet."""
    facts = derived.orchestrator.facts
    run = RunDir(facts.run_dir)
    moorage = (python, "-m", "moorage.cli.main")
    records: list[ProcessRecord] = []
    configs: dict[Path, Any] = {}

    def add(record_name: str, kind: str, config: Any, argv: Sequence[str], **more: Any) -> None:
        path = run.configs / f"{record_name}.json"
        configs[path] = config.model_dump(mode="json")
        records.append(
            ProcessRecord(record_name, kind, (*argv, "@", str(path)), run.log(record_name), **more)
        )

    for index, engine in enumerate(derived.inference):
        visible = devices.engines[index] if index < len(devices.engines) else None
        threads = {"OMP_NUM_THREADS": str(engine.inference.num_threads)}
        add(engine.name, "inference", engine, (*moorage, "inference"), env={**threads, **_visible(visible)})
    for server in derived.env_servers:
        name = f"envs/{server.split}/{server.source.name}.{node_name()}"
        group = f"{server.split}/{server.source.name}"
        add(name, "env_server", server, (*moorage, "env-server"), env=_visible(()), group=group)
    add(
        "orchestrator",
        "orchestrator",
        derived.orchestrator,
        (*moorage, "orchestrator"),
        env=_visible(()),
        ends_well=True,
    )
    trainer = derived.trainer.trainer
    argv = (*moorage, "trainer")
    if trainer.num_ranks > 1:
        torchrun = (
            python,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={trainer.num_ranks}",
        )
        rendezvous = ("--master-addr=127.0.0.1", f"--master-port={rendezvous_port}")
        argv = (*torchrun, *rendezvous, "-m", "moorage.cli.main", "trainer")
    threads = {"OMP_NUM_THREADS": str(trainer.num_threads)}
    add(
        "trainer",
        "trainer",
        derived.trainer,
        argv,
        env={**threads, **_visible(devices.trainer)},
        ends_well=True,
    )
    external = tuple(
        (f"{split}/{source.name}", source.address)
        for split, source in sources_by_split(derived.orchestrator.orchestrator)
        if source.address is not None
    )
    return Plan(
        run=run,
        run_id=facts.run_id,
        attempt=facts.attempt,
        max_steps=facts.max_steps,
        records=_with_on_death(records),
        configs=configs,
        start_step=facts.start_step,
        external=external,
        retains=derived.trainer.payload.retain == "checkpoint",
    )


def _with_on_death(records: list[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """A server whose group has another member may die; the run goes on with the others (R28)."""
    groups = [record.group for record in records]
    return tuple(
        replace(record, on_death="go_on") if record.group and groups.count(record.group) > 1 else record
        for record in records
    )


def _visible(devices: tuple[int, ...] | None) -> dict[str, str]:
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


@dataclass(frozen=True)
class Death:
    """A process that has ended: `code` as subprocess gives it (negative: the signal)."""

    record: ProcessRecord
    code: int

    @property
    def wording(self) -> str:
        if self.code < 0:
            return f"{self.record.name} was killed by {signal.Signals(-self.code).name}"
        return f"{self.record.name} ended with code {self.code}"


def decide(
    death: Death, *, living: Sequence[ProcessRecord], restarts: Sequence[float], now: float
) -> Literal["done", "end_run", "restart", "go_on"]:
    """What the launcher does about a death.

    `living`: records whose process still runs; `restarts`: times at which this record was restarted before.
    """
    record = death.record
    if record.ends_well and death.code == 0:
        return "done"
    if record.on_death == "restart":
        recent = [at for at in restarts if now - at < RESTART_WINDOW_S]
        return "restart" if len(recent) < MAX_RESTARTS else "end_run"
    if record.on_death == "go_on" and record.group:
        return "go_on" if any(other.group == record.group for other in living) else "end_run"
    return record.on_death


def first_cause(deaths: Sequence[Death]) -> Death:
    """Of deaths seen together, the one to show: a killed process, then the kind nearest to the cause."""
    return min(deaths, key=lambda death: (death.code >= 0, KINDS.index(death.record.kind)))
