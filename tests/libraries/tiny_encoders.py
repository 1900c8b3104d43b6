"""A tiny encoder with its tokenizer, and sentences for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "qa"))
import tiny_tokenizers

from tiny import tiny_config

WORDS = ("the", "river", "flows", "through", "old", "town", "and", "on", "to", "sea", "who", "built", "bridge", "over")


def save_encoder(folder: Path, dropout: float) -> Path:
    """Write a tiny encoder and its tokenizer to the folder."""
    tokenizer = tiny_tokenizers.bert()
    torch.manual_seed(0)
    config = tiny_config("bert", dropout=dropout, vocab_size=len(tokenizer))
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    return folder


def sentences(n_sentences: int, seed: int = 0) -> list[str]:
    """Return sentences of 1 to 30 words."""
    numbers = np.random.default_rng(seed)
    return [" ".join(numbers.choice(WORDS, numbers.integers(1, 31))) for _ in range(n_sentences)]
