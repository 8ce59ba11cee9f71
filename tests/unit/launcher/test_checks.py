"""What is refused before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from moorage.config.base import make_config
from moorage.config.env import SourceConfig
from moorage.core.errors import ConfigError
from moorage.launcher import checks


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        checks.read_model_config(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checks.read_model_config(str(tmp_path))


def test_a_model_folder_is_read(dense_model: Path) -> None:
    assert checks.read_model_config(str(dense_model))["model_type"] == "qwen3"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            checks.check_ports("127.0.0.1", [port], "inference.port")
    checks.check_ports("127.0.0.1", checks.choose_ports("127.0.0.1", 0, 2), "inference.port")


@pytest.mark.parametrize("ident", ["moorage.tasksets.reverse_text", "textarena", "owner/textarena@1.0"])
def test_an_installed_taskset_is_found_without_importing_verifiers(ident: str) -> None:
    before = "verifiers.v1" in sys.modules
    checks.check_source("train", make_config(SourceConfig, {"env": {"taskset": {"id": ident}}}))
    assert ("verifiers.v1" in sys.modules) is before


@pytest.mark.parametrize("ident", ["moorage.tasksets.reverse_txt", "no_such_package", "a..b"])
def test_a_taskset_that_is_not_installed_is_named(ident: str) -> None:
    source = make_config(SourceConfig, {"name": "x", "env": {"taskset": {"id": ident}}})
    with pytest.raises(ConfigError, match="cannot be imported"):
        checks.check_source("train", source)


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}]
)
def test_sequences_longer_than_the_model_are_refused_before_anything_starts(config) -> None:
    checks.check_length(512, config)
    checks.check_length(513, {})
    with pytest.raises(ConfigError, match=r"seq_len 513 .* 512; set it to 512 or less"):
        checks.check_length(513, config)
