"""An encoder that all tests of tagging begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_tasks import save_encoder


@pytest.fixture(scope="session")
def word_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder without a head."""
    folder = tmp_path_factory.mktemp("word_encoder")
    save_encoder(folder)
    return folder
