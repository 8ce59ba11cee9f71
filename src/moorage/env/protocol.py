"""The env server's RPC contract: records, kinds of error, frames, limits (docs/protocols.md section 1).

Owns what crosses between an `EnvClient` and a broker. Promises:

- a request is three frames `[request id, method, body]`, a reply `[request id, "reply" | "error", body]`;
- every body is a msgpack map decoded strictly into one of the records here: an unknown or missing field, or a
  wrong type, is a `bad_request` naming it;
- task, sampling and episodes travel as raw msgpack: the broker forwards them without looking inside.

It does not know sockets, nor what an environment is.
"""

from __future__ import annotations

import hmac
import re
from typing import Any

import msgspec

from moorage.core.errors import EnvServerError

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No frame is longer, in either direction."""
PING_S = 5.0
"""A client pings this often."""
LEASE_S = 30.0
"""A holder silent for so long loses its lease."""
CANCEL_S = 5.0
"""A cancel is answered at the latest after this."""

KINDS = (
    "refused",
    "unknown_method",
    "bad_request",
    "task_error",
    "worker_died",
    "cancelled",
    "deadline",
    "server_stopping",
)
REPLY = b"reply"
ERROR = b"error"
REQUEST_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")
"""A request id names a folder in the spool, so nothing else may be in it."""


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every body carries: the run's secret and the attempt that asks."""

    token: str
    run_id: str
    attempt: int
    source: str


class Hello(Request):
    """Take or renew the lease. `adopt`: blob ids that ready batches after the resumed checkpoint name."""

    version: int
    adopt: tuple[str, ...] = ()


class Ping(Request):
    """Keep the lease. `open`: ids of requests that the client awaits."""

    open: tuple[str, ...] = ()


class WireTask(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A task: its class, its data as JSON, and verifiers' key and hash of it, by which episodes name it."""

    data: dict[str, Any]
    type: str = ""
    key: str | None = None
    hash: str | None = None


class Sample(Request):
    """The next task of a stream. `limit`: only the first so many tasks of its order exist."""

    stream: str
    limit: int | None = None


class Restore(Request):
    """Set a stream's cursor to what a `Sampled` said: the next task is the one behind it."""

    stream: str
    epoch: int
    position: int
    limit: int | None = None


class CloseStream(Request):
    """Forget a stream."""

    stream: str


class RunRollout(Request):
    """One episode of a `WireTask`. `policy_version` is None for a frozen policy.

    `deadline_s` counts from receipt.
    """

    task: msgspec.Raw
    model: str
    endpoint: str
    policy_version: int | None
    sampling: msgspec.Raw
    deadline_s: float


class RunGroup(RunRollout):
    """`n` episodes of a task, whole or not at all."""

    n: int


class Cancel(Request):
    """Abort runs. Idempotent."""

    ids: tuple[str, ...]


class Ack(Request):
    """Take over the episodes of these requests. May be repeated."""

    ids: tuple[str, ...]


class Bye(Request):
    """The attempt is over: free everything but `retain`."""

    retain: tuple[str, ...] = ()


class HelloReply(msgspec.Struct, kw_only=True):
    """What the server is. `num_tasks` is None for an infinite taskset."""

    env_id: str
    num_tasks: int | None
    scores_groups: bool
    store: str
    payload_url: str
    server_id: str
    versions: dict[str, str]


class Load(msgspec.Struct, kw_only=True):
    """How busy a server is, and what it has refused or survived since it started."""

    workers: int
    running: int
    queued: int
    unacknowledged: int
    streams: int
    malformed: int
    disconnected: int
    worker_deaths: int
    payload_restarts: int


class PingReply(msgspec.Struct, kw_only=True):
    """`in_flight`: requests without an answer. `unknown`: which of the open ids this server does not know."""

    server_id: str
    load: Load
    in_flight: int
    ledger: dict[str, Any] | None
    unknown: tuple[str, ...]


class SampleReply(msgspec.Struct, kw_only=True):
    """A `WireTask`, and the stream's cursor behind it: giving that to `restore` continues after this task."""

    task: msgspec.Raw
    epoch: int
    position: int


class CancelReply(msgspec.Struct, kw_only=True):
    """Which of the ids were live."""

    live: tuple[str, ...]


class AckReply(msgspec.Struct, kw_only=True):
    """`owned` ids now belong to the client; `unknown` ones do not exist (any more)."""

    owned: tuple[str, ...]
    unknown: tuple[str, ...]


class ByeReply(msgspec.Struct, kw_only=True):
    """The final account."""

    ledger: dict[str, Any] | None


class Done(msgspec.Struct, kw_only=True):
    """A reply that says only: done."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error reply."""

    kind: str
    message: str


METHODS: dict[bytes, type[Request]] = {
    b"hello": Hello,
    b"ping": Ping,
    b"sample": Sample,
    b"restore": Restore,
    b"close_stream": CloseStream,
    b"run_rollout": RunRollout,
    b"run_group": RunGroup,
    b"cancel": Cancel,
    b"ack": Ack,
    b"bye": Bye,
}
_DECODERS = {name: msgspec.msgpack.Decoder(record) for name, record in METHODS.items()}
_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode


def decode_request(method: bytes, body: bytes) -> Request:
    """The record of a request. Raises EnvServerError `unknown_method` or `bad_request`."""
    decoder = _DECODERS.get(method)
    if decoder is None:
        shown = method[:40].decode(errors="replace")
        valid = ", ".join(name.decode() for name in METHODS)
        raise EnvServerError("unknown_method", f"unknown method {shown!r} (valid: {valid})")
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise EnvServerError("bad_request", f"{method.decode()}: {error}") from None


def encode_error(kind: str, message: str) -> bytes:
    """The body of an error reply."""
    return encode(ErrorBody(kind=kind, message=message))


def decode_error(body: bytes) -> EnvServerError:
    """The error a reply names; a body that cannot be read is itself an error."""
    try:
        record = msgspec.msgpack.decode(body, type=ErrorBody)
    except msgspec.DecodeError as error:
        return EnvServerError("bad_request", f"the server sent an error that cannot be read: {error}")
    return EnvServerError(record.kind, record.message)


def is_token(given: str, secret: str) -> bool:
    """Whether the secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), secret.encode())


def check_size(what: str, size_bytes: int, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Raise EnvServerError when a message is too long to be sent."""
    if size_bytes > limit_bytes:
        raise EnvServerError(
            "bad_request",
            f"{what} is {size_bytes} bytes, above the limit of {limit_bytes} bytes for one message; "
            "shorten the task or the episode's text",
        )


def routing_id(run_id: str, attempt: int, source: str) -> bytes:
    """The identity of a client: attempt and source, so that it survives a reconnect."""
    identity = f"{run_id}/{attempt}/{source}".encode()
    if len(identity) > 255:
        raise EnvServerError("bad_request", f"run id and source name are too long together: {identity!r}")
    return identity
