"""What leaves the broker: answers, those that may be asked for again, and those that could not be delivered.

Promises: an answer that was `remember`ed is given again, unchanged, to whoever repeats its request within
`KEPT_S`; an answer to a peer that is away for the moment is sent when it is back, as long as it has a lease.
It does not know what the answers say.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Container

import msgspec

from moorage.env import protocol as wire
from moorage.env.port import Port

KEPT_S = 60.0


class Answers:
    """The sending half of a ROUTER socket."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._kept: OrderedDict[tuple[bytes, bytes], tuple[float, list[bytes]]] = OrderedDict()
        self._waiting: dict[bytes, deque[list[bytes]]] = {}

    def send(self, identity: bytes, frame_id: bytes, kind: bytes, body: bytes) -> None:
        """Send an answer now, or as soon as the peer is back."""
        self._send([identity, frame_id, kind, body])

    def reply(self, identity: bytes, frame_id: bytes, record: msgspec.Struct) -> None:
        """Send a record as a reply."""
        self._send([identity, frame_id, wire.REPLY, wire.encode(record)])

    def error(self, identity: bytes, frame_id: bytes, kind: str, message: str) -> None:
        """Send an error."""
        self._send([identity, frame_id, wire.ERROR, wire.encode_error(kind, message)])

    def remember(self, identity: bytes, frame_id: bytes, kind: bytes, body: bytes) -> None:
        """Send an answer that may be lost on the way: it is there when the request comes again."""
        frames = [identity, frame_id, kind, body]
        self._kept[identity, frame_id] = (time.monotonic(), frames)
        self._send(frames)

    def repeat(self, identity: bytes, frame_id: bytes) -> bool:
        """Send a remembered answer again. False when there is none."""
        known = self._kept.get((identity, frame_id))
        if known is not None:
            self._send(known[1])
        return known is not None

    def tend(self, leased: Container[bytes]) -> None:
        """Try undelivered answers again; forget those of peers without a lease, and old remembered ones."""
        oldest = time.monotonic() - KEPT_S
        while self._kept and next(iter(self._kept.values()))[0] < oldest:
            self._kept.popitem(last=False)
        for identity, waiting in list(self._waiting.items()):
            while waiting and self._port.send(waiting[0]):
                waiting.popleft()
            if not waiting or identity not in leased:
                del self._waiting[identity]

    def _send(self, frames: list[bytes]) -> None:
        waiting = self._waiting.get(frames[0])
        if waiting is not None:
            waiting.append(frames)
        elif not self._port.send(frames):
            self._waiting[frames[0]] = deque([frames])
