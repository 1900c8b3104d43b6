"""A decoder that these tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from saved_decoder import save_decoder


@pytest.fixture(scope="session")
def small_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    folder = tmp_path_factory.mktemp("small_decoder")
    save_decoder(folder)
    return folder
