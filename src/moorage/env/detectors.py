"""The degeneracy detectors of an env server, from its config (R19).

Promises: an unknown detector or threshold is a ConfigError naming the valid ones; each detector is a function
of the aligned streams of one branch, and all are always measured.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moorage.config.base import suggestion
from moorage.core.errors import ConfigError
from moorage.payload import detect

Detector = Callable[[np.ndarray, np.ndarray, np.ndarray], bool]
"""(token ids, sampled, log-probabilities) of a branch to whether it is degenerate."""

NAMES = ("gibberish", "repetition")


def make_detectors(settings: Mapping[str, Any], model_path: str | Path) -> dict[str, Detector]:
    """All detectors, with the thresholds of `settings` (`{repetition = {window = 500}}`)."""
    for name in settings:
        if name not in NAMES:
            raise ConfigError(f"unknown detector `{name}`{suggestion(name, list(NAMES))}")
    vocab_size = read_vocab_size(Path(model_path))
    gibberish = _bound(detect.gibberish, "gibberish", settings, vocab_size=vocab_size)
    repetition = _bound(detect.repetition, "repetition", settings)
    return {
        "gibberish": gibberish,
        "repetition": lambda _, sampled, logprobs: repetition(sampled, logprobs),
    }


def read_vocab_size(model_path: Path) -> int:
    """`vocab_size` of a model folder's config.json (of its text part, where it has several)."""
    try:
        described = json.loads((model_path / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{model_path}: no config.json; give a model folder in Hugging Face layout"
        ) from None
    size = described.get("vocab_size") or (described.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{model_path}/config.json: no vocab_size")
    return size


def _bound(
    function: Callable[..., bool], name: str, settings: Mapping[str, Any], **given: Any
) -> Callable[..., bool]:
    keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    thresholds = dict(settings.get(name) or {})
    for key in thresholds:
        valid = [keyword for keyword in keywords if keyword not in given]
        if key not in valid:
            raise ConfigError(f"unknown threshold `{name}.{key}`{suggestion(key, valid)}")
    return functools.partial(function, **given, **thresholds)
