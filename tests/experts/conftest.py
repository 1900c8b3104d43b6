"""A decoder and an encoder that these tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from saved_decoder import save_decoder
from text_tasks import save_encoder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tiny BERT, each with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    save_decoder(folder / "lm")
    save_encoder(folder / "encoder")
    return folder
