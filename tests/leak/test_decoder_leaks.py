"""Rows of a batch of a causal language model do not know of each other: one is changed, the others stay."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from leak_runs import DROPOUT, FORMATS, FORMS, SEED, WAYS, Run, measure_form, most, moved, run_padded
from torch import Tensor

import engine
import whet
from tiny import DECODERS, arguments
from tiny_decoders import collate, tiny_decoder
from whet.objectives.next_tokens import head_of, logits_of

_QUICK = ("gpt2", "llama", "gemma2", "mixtral")
EACH = [one if one in _QUICK else pytest.param(one, marks=pytest.mark.reliability) for one in DECODERS]


def packed(model: Any, folder: Path) -> Run:
    """How whet's Trainer runs the model, with the logits of all tokens."""
    objective: Any = engine.Trainer(model, arguments(folder), collate).objective
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
@pytest.mark.parametrize("family", EACH)
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
    assert found.logits <= most(family)
    assert found.gradients <= most(family)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", EACH)
def test_a_changed_row_moves_no_other_that_a_caller_lays_next_to_it(family: str, form: str, number_format: str) -> None:
    """Under a mask of ones transformers' decoders do not look for sequences, and let them see each other."""
    found = measure_form(family, form, number_format)
    assert found is not None
    assert found.own > 1e-3
    if form == "mask of ones":
        assert found.logits > 1e-2
        return
    assert found.logits <= most(family)
    assert found.gradients <= most(family)
