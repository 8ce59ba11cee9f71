"""`bye` to the env servers of an attempt: the last message, which brings their final ledgers.

It speaks the small part of docs/protocols.md section 1 that it needs by itself: the environment library that
the full client loads costs seconds and hundreds of MiB.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from moorage.core.rundir import RunDir, read_json
from moorage.records.payload import Ledger

METHOD = b"bye"


@dataclass(frozen=True)
class Station:
    """An env server, as its address file or a source's `address` describes it."""

    source: str
    store: str
    rpc: str
    spool: str | None = None


@dataclass(frozen=True)
class Identity:
    """What every message of an attempt carries."""

    token: str
    run_id: str
    attempt: int


def read_stations(run: RunDir) -> list[Station]:
    """Every env server that has published its address in the run folder."""
    stations = []
    for path in sorted(run.envs.glob("*/*.address")):
        body = read_json(path)
        if body:
            stations.append(_station(path, body))
    return stations


def _station(path: Path, body: dict[str, Any]) -> Station:
    store = path.name.removesuffix(".address")
    source = f"{path.parent.name}/{store.rsplit('.', 1)[0]}"
    return Station(source, f"{path.parent.name}/{store}", body["rpc"], body.get("spool"))


def say_bye(
    stations: Iterable[Station], identity: Identity, *, retain: Iterable[str] = (), timeout_s: float = 5.0
) -> dict[str, Ledger | None]:
    """Send `bye` to all at once. Store to final ledger; None for a server that did not answer in time."""
    stations = list(stations)
    ledgers: dict[str, Ledger | None] = {station.store: None for station in stations}
    context = zmq.Context()
    poller = zmq.Poller()
    sockets: dict[Any, Station] = {}
    try:
        for station in stations:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(station.rpc)
            socket.send_multipart([uuid.uuid4().hex.encode(), METHOD, _body(station, identity, retain)])
            poller.register(socket, zmq.POLLIN)
            sockets[socket] = station
        deadline = time.monotonic() + timeout_s
        waiting = set(sockets)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left * 1000) + 1):
                ledgers[sockets[socket].store] = _ledger(socket.recv_multipart())
                poller.unregister(socket)
                waiting.discard(socket)
    finally:
        context.destroy(linger=0)
    return ledgers


def _body(station: Station, identity: Identity, retain: Iterable[str]) -> bytes:
    return msgspec.msgpack.encode(
        {
            "token": identity.token,
            "run_id": identity.run_id,
            "attempt": identity.attempt,
            "source": station.source,
            "retain": list(retain),
        }
    )


def _ledger(frames: list[bytes]) -> Ledger | None:
    if len(frames) != 3 or frames[1] != b"reply":
        return None
    body = msgspec.msgpack.decode(frames[2])
    return msgspec.convert(body["ledger"], Ledger) if body.get("ledger") is not None else None
