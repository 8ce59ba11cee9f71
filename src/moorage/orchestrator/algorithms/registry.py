"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage.orchestrator.algorithms.base import Algorithm, make_algorithm
from moorage.orchestrator.algorithms.grpo import Grpo

ALGORITHMS: dict[str, type] = {"grpo": Grpo}


def resolve_algorithm(table: Mapping[str, Any]) -> Algorithm:
    """The algorithm that a config table names: one of `ALGORITHMS`, or a class by import path."""
    return make_algorithm(table, ALGORITHMS)
