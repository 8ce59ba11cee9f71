"""Policy losses: a registry of small frozen dataclasses, each its own options.

`make_loss(table)` turns `trainer.loss` into a loss. A name is one of `LOSSES`, or the import path of a class
(`package.module.Class` or `package.module:Class`) that takes its options as keyword arguments and is called
with `LossInputs`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, cast

from moorage.config.base import suggestion
from moorage.core.errors import ConfigError
from moorage.trainer.losses.base import LossInputs, LossOutput, PolicyLoss
from moorage.trainer.losses.ipo import IPO
from moorage.trainer.losses.ppo import PPO

__all__ = ["LOSSES", "LossInputs", "LossOutput", "PolicyLoss", "make_loss"]

LOSSES: dict[str, type[PolicyLoss]] = {"ipo": IPO, "ppo": PPO}


def make_loss(table: Mapping[str, Any]) -> PolicyLoss:
    """The loss that `table` names, with its options. Raises ConfigError naming what is wrong."""
    options = dict(table)
    name = options.pop("type", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"trainer.loss needs a `type`, one of {', '.join(sorted(LOSSES))} or an import path"
        )
    cls: Any = LOSSES.get(name) or _import_loss(name)
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        for key in options:
            if key not in fields:
                raise ConfigError(f"trainer.loss.{key}: {name} has no such option{suggestion(key, fields)}")
    factory: Any = cls  # narrowed to a dataclass above
    try:
        return cast(PolicyLoss, factory(**options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trainer.loss: {name} refuses {options!r}: {error}") from None


def _import_loss(name: str) -> Any:
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"trainer.loss.type {name!r} is no loss{suggestion(name, sorted(LOSSES))}")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"trainer.loss.type {name!r} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"trainer.loss.type: {module_name} has no {attribute!r}") from None
