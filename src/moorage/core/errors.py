"""The error vocabulary.

One class for each boundary that can fail, so that a reader of a traceback knows whose fault it is:

- `ConfigError`: a person wrote something that cannot work; the message names the value and the remedy.
- `EngineError`, `EnvServerError`, `PayloadError`, `ExchangeError`: the outside thing of that name failed.
- `TrainingError`: training cannot go on: a loss or a gradient is no number.
- `RunEnded`: a peer is dead or wrote `END.json`; whoever waits for it stops.

Everything else that is raised is a bug of ours and crashes the process that has it.
"""

from __future__ import annotations


class MoorageError(Exception):
    """Base of every error that moorage raises on purpose."""


class ConfigError(MoorageError):
    """A setting cannot work. The message names the value and what to write instead."""


class EngineError(MoorageError):
    """An inference engine refused, failed or did not answer.

    `status` is the HTTP status when there was an answer, else None. `retryable` tells the caller whether
    the same request may succeed later (connection lost, 503) or never will (400).
    """

    def __init__(self, message: str, *, status: int | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class EnvServerError(MoorageError):
    """An env server answered with an error, or did not answer.

    `kind` is one of the kinds of docs/protocols.md section 1: refused, unknown_method, bad_request,
    task_error, worker_died, cancelled, deadline, server_stopping; and `unreachable` when no answer came.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PayloadError(MoorageError):
    """A payload store refused, lost or spoiled a blob. `final` is False when a retry could help."""

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class ExchangeError(MoorageError):
    """A batch or a weight version in the run folder is missing, torn or does not fit."""


class TrainingError(MoorageError):
    """The model cannot be trained further. The message names the step, the values and what to try."""


class RunEnded(MoorageError):
    """A peer of this run is gone: its heartbeat is old or the run's END.json exists."""
