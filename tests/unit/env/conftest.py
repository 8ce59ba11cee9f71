"""A tokenizer folder that renders tools and dialogue, for the tests of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chatty_model import make_chatty_folder


@pytest.fixture(scope="session")
def chatty_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty_folder(tmp_path_factory.mktemp("chatty") / "model")
