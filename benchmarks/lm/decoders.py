"""What the benchmark of language models trains: decoders of the shapes that people use, on rows of mixed length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEED = 42
SHORTEST, LONGEST = 32, 1024
"""Tokens of a row; every length between them is equally likely."""
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Decoder:
    """A model of random weights."""

    title: str
    model_type: str
    settings: dict[str, Any]
    """What differs from the defaults of the type."""
    batch: int = 4


DECODERS = {
    "llama60m": Decoder(
        "Llama, 60M parameters", "llama",
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 14, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 32_000, "tie_word_embeddings": True},
    ),
    "qwen3": Decoder(
        "Qwen3-0.6B's shape, 4 of 28 layers", "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
        batch=2,
    ),
    "vocabulary128k": Decoder(
        "Llama, 4 layers of 512, a vocabulary of 128,000", "llama",
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 128_000, "tie_word_embeddings": True},
    ),
    "gpt2": Decoder("GPT-2, 124M parameters", "gpt2", {}),
}  # fmt: skip


def save(name: str, folder: Path) -> None:
    """Write the model; its dropout is off, as it is in most decoders."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    one = DECODERS[name]
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(one.model_type, **one.settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, rate):
            setattr(config, rate, 0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rows(n_rows: int) -> list[Row]:
    """Return rows of random tokens; all tokens but the first of a row are predicted."""
    numbers = np.random.default_rng(SEED)
    found = []
    for length in numbers.integers(SHORTEST, LONGEST + 1, n_rows):
        ids = numbers.integers(3, 20_000, int(length)).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found
