"""What whet saves is a model of transformers, and what whet prepared still is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

import engine
from tiny import FAMILIES, VOCABULARY, arguments, padded, tiny_model, tiny_rows

# Logits of size 0.5 after two layers of float32 sums in another order; seen: 4e-7.
TOLERANCE = 5e-6

families = pytest.mark.parametrize("family", FAMILIES)
operators = pytest.mark.usefixtures("operators")


def trained(folder: Path, family: str, **changes: Any) -> engine.Trainer:
    """Return a trainer of the family after four steps."""
    settings = arguments(folder, **({"max_steps": 4} | changes))
    trainer = engine.Trainer(model=tiny_model(family, dropout=0.1), args=settings, train_dataset=tiny_rows(16, family))
    trainer.train()
    return trainer


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return start and end logits of real tokens, from a padded call."""
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    with torch.no_grad():
        output = model(**inputs)
    return torch.stack([output.start_logits, output.end_logits])[:, batch["attention_mask"].bool()]


@pytest.mark.every_family
@families
def test_a_saved_model_loads_in_transformers_with_the_same_logits(tmp_path: Path, family: str) -> None:
    trainer = trained(tmp_path, family)
    trainer.save_model(str(tmp_path / "saved"))
    loaded, report = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values())
    rows = tiny_rows(7, family, seed=5)
    predicted = torch.from_numpy(trainer.predict(rows).predictions[0])
    found = logits(loaded.eval(), padded(list(rows), loaded.config.pad_token_id))[0]
    torch.testing.assert_close(found, predicted[predicted != -100], rtol=0, atol=TOLERANCE)


@families
def test_saved_files_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """config.json holds the same keys and values as without whet, and model.safetensors the same names."""
    untouched = tiny_model(family, dropout=0.1)
    untouched.save_pretrained(tmp_path / "theirs")
    trained(tmp_path, family).save_model(str(tmp_path / "ours"))
    assert _config(tmp_path / "ours") == _config(tmp_path / "theirs")
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "ours")
    assert {n: t.shape for n, t in loaded.state_dict().items()} == {
        n: t.shape for n, t in untouched.state_dict().items()
    }


def test_a_checkpoint_loads_in_transformers(tmp_path: Path) -> None:
    model = trained(tmp_path, "bert", save_strategy="steps", save_steps=2).model
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    earlier = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "checkpoint-2")
    assert not torch.equal(earlier.qa_outputs.weight, model.qa_outputs.weight)


def _shapes(file: Path) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in load_file(file).items()}


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))


@operators
@families
def test_ordinary_padded_calls_answer_as_before(tmp_path: Path, family: str) -> None:
    """With a mask and without, with labels and without, before training and after."""
    rows, untouched, model = tiny_rows(9, family), tiny_model(family).eval(), tiny_model(family)
    batch = padded(list(rows), untouched.config.pad_token_id)
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=rows)
    model.eval()
    torch.testing.assert_close(logits(model, batch), logits(untouched, batch), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(model(**batch).loss, untouched(**batch).loss, rtol=TOLERANCE, atol=0)
    whole_row = torch.tensor([rows[0]["input_ids"]])
    bare = model(whole_row, return_dict=False)[0], untouched(whole_row, return_dict=False)[0]
    torch.testing.assert_close(*bare, rtol=0, atol=TOLERANCE)
    trainer.train()
    untouched.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model.eval(), batch), logits(untouched, batch), rtol=0, atol=TOLERANCE)


@operators
@families
def test_ordinary_training_calls_drop_as_before(tmp_path: Path, family: str) -> None:
    """Someone else's training step: another mask at each call, the same ones from the same seed of torch."""
    model, rows = tiny_model(family, dropout=0.1), tiny_rows(4, family)
    engine.Trainer(model=model, args=arguments(tmp_path))
    batch = padded(list(rows), model.config.pad_token_id)
    model.train()
    torch.manual_seed(3)
    first, second = logits(model, batch), logits(model, batch)
    assert float((first - second).abs().max()) > 0.01
    torch.manual_seed(3)
    torch.testing.assert_close(logits(model, batch), first, rtol=0, atol=0)
    model(**batch).loss.backward()
    head = getattr(model, "qa_outputs", None) or model.classifier
    assert all(parameter.grad is not None for parameter in head.parameters())


@operators
def test_a_step_that_fails_leaves_an_ordinary_model(tmp_path: Path) -> None:
    """A token that the model has no embedding for ends the run; the model answers padded calls as ever."""
    untouched, model, rows = tiny_model("bert").eval(), tiny_model("bert"), tiny_rows(4)
    beyond = {"input_ids": [5, VOCABULARY, 6], "start_positions": 0, "end_positions": 1}
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=[beyond])
    with pytest.raises(IndexError):
        trainer.train()
    batch = padded(list(rows), 0)
    torch.testing.assert_close(logits(model.eval(), batch), logits(untouched, batch), rtol=0, atol=TOLERANCE)
