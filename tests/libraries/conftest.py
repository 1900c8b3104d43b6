"""Folders with small encoders for the tests of other people's libraries."""

from pathlib import Path

import pytest
from tiny_encoders import save_encoder


@pytest.fixture
def encoder_folder(tmp_path: Path) -> Path:
    """Return a folder with a tiny BERT encoder without dropout and its tokenizer."""
    return save_encoder(tmp_path / "encoder", dropout=0.0)


@pytest.fixture
def dropout_folder(tmp_path: Path) -> Path:
    """Return the same with dropout."""
    return save_encoder(tmp_path / "encoder_with_dropout", dropout=0.1)
