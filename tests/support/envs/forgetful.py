"""A taskset whose tasks do not survive the wire: one field is left out when they are written."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["ForgetfulTaskset"]


class ForgetfulData(vf.TaskData):
    secret: str = Field("", exclude=True)


class ForgetfulTask(vf.Task[ForgetfulData]):
    pass


class ForgetfulTaskset(vf.Taskset[ForgetfulTask]):
    DEFAULT_HARNESS = "moorage.env.direct"

    def load(self) -> Iterable[ForgetfulTask]:
        yield ForgetfulTask(ForgetfulData(prompt="x", secret="y"))
