"""A packed model gives what the untouched transformers model gives for padded rows: logits, gradients, saved files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import engine
from tiny import arguments, padded, tiny_model, tiny_rows
from whet.data.store import RowStore

# Logits are of size 0.5; each is rounded some dozen times in float32 on its way; seen: 4e-7.
TOLERANCE = 5e-6

operators = pytest.mark.usefixtures("operators")


def trainer_of(folder: Path, model: Any) -> engine.Trainer:
    """Return a trainer whose model whet has prepared."""
    trainer = engine.Trainer(model=model, args=arguments(folder))
    assert trainer.objective.packed
    return trainer


def padded_logits(model: nn.Module, rows: RowStore, pad_id: int) -> list[np.ndarray]:
    """Return start and end logits (rows, longest) of a padded call in eval mode, padding filled with -100."""
    batch = padded(list(rows), pad_id)
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    with torch.no_grad():
        output = model.eval()(**inputs)
    padding = batch["attention_mask"] == 0
    return [side.masked_fill(padding, -100).numpy() for side in (output.start_logits, output.end_logits)]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("family", ["albert", "bert", "distilbert"])
def test_every_activation(tmp_path: Path, family: str, activation: str) -> None:
    """Also those for which whet has no operator of its own."""
    name = "activation" if family == "distilbert" else "hidden_act"
    rows, untouched = tiny_rows(5, family), tiny_model(family, **{name: activation})
    wanted = padded_logits(untouched, rows, untouched.config.pad_token_id)
    found = trainer_of(tmp_path, tiny_model(family, **{name: activation})).predict(rows).predictions
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["albert", "bert", "electra"])
def test_rows_without_segments(tmp_path: Path, family: str) -> None:
    rows = tiny_rows(5, "roberta")
    untouched = tiny_model(family)
    wanted = padded_logits(untouched, rows, untouched.config.pad_token_id)
    found = trainer_of(tmp_path, tiny_model(family)).predict(rows).predictions
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("frozen_by", ["before", "after"])
def test_a_frozen_table_gets_no_gradient(tmp_path: Path, frozen_by: str) -> None:
    """A user may freeze the words before the Trainer is built, or after."""
    model, rows = tiny_model("bert"), tiny_rows(8)
    words = model.get_input_embeddings().weight
    words.requires_grad_(frozen_by == "after")
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=3, weight_decay=0.1), train_dataset=rows)
    words.requires_grad_(False)
    before, head = words.detach().clone(), model.qa_outputs.weight.detach().clone()
    trainer.train()
    assert torch.equal(words, before)
    assert words.grad is None
    assert not torch.equal(model.qa_outputs.weight, head)


@operators
def test_a_model_may_have_a_second_trainer(tmp_path: Path) -> None:
    """One to evaluate, one to train: the second finds the model as the first did."""
    rows, model = tiny_rows(9), tiny_model("bert", dropout=0.1)
    first = trainer_of(tmp_path, model).predict(rows).predictions
    np.testing.assert_array_equal(trainer_of(tmp_path, model).predict(rows).predictions, first)
    trained = [tiny_model("bert", dropout=0.1), tiny_model("bert", dropout=0.1)]
    trainer_of(tmp_path, trained[1])
    for one in trained:
        engine.Trainer(model=one, args=arguments(tmp_path, max_steps=4), train_dataset=rows).train()
    assert all(torch.equal(a, b) for a, b in zip(trained[0].parameters(), trained[1].parameters(), strict=True))


def test_a_copy_of_a_packed_model_is_independent(tmp_path: Path) -> None:
    """Averages of weights, teachers and the like begin with copy.deepcopy."""
    rows, model = tiny_rows(9), tiny_model("bert")
    trainer_of(tmp_path, model)
    twin = copy.deepcopy(model)
    wanted = trainer_of(tmp_path, model).predict(rows).predictions
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    np.testing.assert_allclose(padded_logits(twin, rows, 0), wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(trainer_of(tmp_path, twin).predict(rows).predictions, wanted)
