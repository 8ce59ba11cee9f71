"""An evaluation that could not run, or would not do what its file says, is refused when the file is read."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.config.base import make_config
from moorage.config.evaluation import EvaluationConfig
from moorage.core.errors import ConfigError
from tests.unit.config.test_derive import SOURCE

FLOAT64 = {"model": {"path": "m", "dtype": "float64"}}


def evaluation(**changes: Any) -> EvaluationConfig:
    return make_config(EvaluationConfig, {"model": {"path": "m"}, "sources": [SOURCE], **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sources": []}, "names no environment"),
        ({"sources": [SOURCE, SOURCE]}, "share a name"),
        ({"inference": {"urls": ["http://h:1"]}}, "name the engine with `endpoint`"),
        ({"inference": {"replicas": 2}}, "an evaluation starts one engine"),
        (FLOAT64, "no engine computes in float64.* set inference.dtype"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluation(**changes)


def test_a_float64_folder_is_measured_by_an_engine_with_a_dtype_of_its_own_or_elsewhere() -> None:
    evaluation(**FLOAT64, inference={"dtype": "float32"})
    evaluation(**FLOAT64, endpoint="http://h:1")
