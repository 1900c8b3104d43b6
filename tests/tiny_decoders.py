"""Tiny random decoders of each family, rows of tokens for them, and their padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import engine
from tiny import DECODERS, FIRST_WORD, VOCABULARY, arguments, tiny_config

__all__ = ["DECODERS"]
Rows = list[dict[str, Any]]


def tiny_decoder(family: str, *, dropout: float = 0.0, seed: int = 0, **changes: Any) -> Any:
    """Return a new causal language model in float32, the same each time, whose norms and biases are not 1 and 0."""
    torch.manual_seed(seed)
    rates = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), dropout)
    model = AutoModelForCausalLM.from_config(tiny_config(family, dropout=dropout, **rates, **changes))
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(weight, float(weight.detach().mean()), 0.1)
    return model


def token_rows(n_rows: int, *, lengths: tuple[int, int] = (3, 40), labelled: float = 0.7, seed: int = 1) -> Rows:
    """Return rows of random tokens, of which this share are targets."""
    numbers = np.random.default_rng(seed)
    found = []
    for length in numbers.integers(lengths[0], lengths[1] + 1, n_rows):
        ids = numbers.integers(FIRST_WORD, VOCABULARY, int(length)).tolist()
        found.append({"input_ids": ids, "labels": [one if numbers.random() < labelled else -100 for one in ids]})
    return found


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the rows padded on the right, with a mask; padding has no labels."""
    longest = max(len(row["input_ids"]) for row in rows)

    def table(name: str, fill: int) -> Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    n_tokens = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(longest) < n_tokens[:, None]).long()
    return {"input_ids": table("input_ids", 0), "labels": table("labels", -100), "attention_mask": mask}


def trainer_of(folder: Path, model: Any, rows: Rows, **settings: Any) -> Any:
    """Return a trainer of the rows whose batches run packed."""
    trainer = engine.Trainer(model=model, args=arguments(folder, **settings), train_dataset=rows, data_collator=collate)
    assert trainer.objective.packed
    return trainer
