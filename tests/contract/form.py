"""Whether two JSON values have the same form: the same keys and types, field by field."""

from __future__ import annotations

from typing import Any

OPEN = frozenset({"routed_experts", "sampling_mask", "stop_reason", "rank", "param"})
"""Fields that are null or a value by what was asked for and drawn."""


def form_faults(expected: Any, actual: Any, where: str = "body") -> list[str]:
    """How `actual` differs in form from `expected`; elements of a list must look like the first expected."""
    if where.rsplit(".", 1)[-1] in OPEN and (expected is None or actual is None):
        return []
    if isinstance(expected, dict) and isinstance(actual, dict):
        faults = [f"{where}.{key} is missing" for key in expected.keys() - actual.keys()]
        faults += [f"{where}.{key} is not vLLM's" for key in actual.keys() - expected.keys()]
        for key in expected.keys() & actual.keys():
            faults += form_faults(expected[key], actual[key], f"{where}.{key}")
        return faults
    if isinstance(expected, list) and isinstance(actual, list):
        return [f for item in actual if expected for f in form_faults(expected[0], item, f"{where}[]")]
    if type(expected) is not type(actual):
        return [f"{where} is {type(actual).__name__} {actual!r}, vLLM sends {type(expected).__name__}"]
    return []
