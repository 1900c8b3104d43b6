"""Rows of a batch of a causal language model do not know of each other: one is changed, the others stay."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from leak_runs import DROPOUT, FORMATS, SEED, WAYS, Run, moved, run_padded
from torch import Tensor

import whet
from tiny import DECODERS, arguments
from tiny_decoders import collate, tiny_decoder
from whet.objectives.next_tokens import head_of, logits_of

_WITH_EXPERTS = ("moe", "mixtral")
_ANOTHER_ORDER = 1e-4
"""An expert computes the tokens that chose it together: a product of another size may sum in another order. What one
row gives another by a leak is of the size of its own change, above 1."""
_QUICK = ("gpt2", "llama", "gemma2", "mixtral")


def packed(model: Any, folder: Path) -> Run:
    """How whet's Trainer runs the model, with the logits of all tokens."""
    objective: Any = whet.Trainer(model, arguments(folder), collate).objective
    assert objective.packed

    def run(rows: list[dict[str, Any]]) -> list[Tensor]:
        batch = objective.batch(rows, range(len(rows)), 0)
        batch.inputs["labels"].fill_(-100)
        batch.inputs.pop("labels")  # without labels each token is read
        read = objective.run(batch, lambda states, *_: logits_of(states, *head_of(model)), seed=SEED, step=1)
        return list(read.split([len(row["input_ids"]) for row in rows]))

    return run


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family", [one if one in _QUICK else pytest.param(one, marks=pytest.mark.reliability) for one in DECODERS]
)
def test_a_changed_row_moves_no_other_row_of_a_decoder(
    family: str, way: str, number_format: str, tmp_path: Path
) -> None:
    model, dtype = tiny_decoder(family, dropout=DROPOUT).train(), FORMATS[number_format]
    if way == "optimized":
        autocast, run = nullcontext(), partial(run_padded, whet.optimize(model, dtype=dtype))
    else:
        autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        run = packed(model, tmp_path) if way == "packed" else partial(run_padded, model)
    with autocast:
        found = moved(model, run, "words")
    assert found.own > 1e-3
    most = _ANOTHER_ORDER if family.endswith(_WITH_EXPERTS) else 0.0
    assert found.logits <= most
    assert found.gradients <= most
