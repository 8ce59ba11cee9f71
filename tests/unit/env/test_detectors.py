"""Detectors from a config: all of them, with the thresholds that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moorage.core.errors import ConfigError
from moorage.env.detectors import make_detectors


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128}))
    return tmp_path


def test_thresholds_come_from_the_config(model_path: Path) -> None:
    sure = np.zeros(20, np.float32)
    ids, sampled = np.zeros(20, np.int32), np.ones(20, bool)
    strict = make_detectors({"repetition": {"window": 20}}, model_path)
    assert strict["repetition"](ids, sampled, sure)
    assert not make_detectors({}, model_path)["repetition"](ids, sampled, sure)


def test_a_token_far_below_uniform_is_gibberish_by_the_models_vocabulary(model_path: Path) -> None:
    detectors = make_detectors({"gibberish": {"token_id_threshold": 100}}, model_path)
    ids, sampled = np.array([120], np.int32), np.ones(1, bool)
    assert detectors["gibberish"](ids, sampled, np.array([-7.0], np.float32))
    assert not detectors["gibberish"](ids, sampled, np.array([-6.0], np.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gibbrish": {}}, r"unknown detector `gibbrish` \(did you mean `gibberish`"),
        ({"repetition": {"windw": 3}}, r"unknown threshold `repetition.windw` \(did you mean `window`"),
        ({"gibberish": {"vocab_size": 3}}, r"unknown threshold `gibberish.vocab_size`"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(
    settings: dict, message: str, model_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_detectors(settings, model_path)


def test_a_folder_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        make_detectors({}, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no vocab_size"):
        make_detectors({}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7}}))
    assert set(make_detectors({}, tmp_path)) == {"gibberish", "repetition"}
