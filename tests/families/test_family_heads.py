"""`whet.optimize` leaves what each head of each family computes: loss, logits and gradients of a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import whet
from tiny import FAMILIES, need_head, padded, tiny_config, tiny_rows

families = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.usefixtures("operators")


def _questions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def _classes(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"labels": torch.arange(len(batch["input_ids"])) % 3}


def _tags(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)}


def _words(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


HEADS = {
    "questions": (AutoModelForQuestionAnswering, _questions),
    "classes": (AutoModelForSequenceClassification, _classes),
    "tags": (AutoModelForTokenClassification, _tags),
    "words": (AutoModelForMaskedLM, _words),
}


def batch_of(family: str, task: str) -> dict[str, Tensor]:
    batch = padded(list(tiny_rows(5, family)), tiny_config(family).pad_token_id or 0)
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    return inputs | HEADS[task][1](batch)


def model_of(family: str, task: str) -> Any:
    torch.manual_seed(2)
    labels = {} if task in ("questions", "words") else {"num_labels": 3}
    return HEADS[task][0].from_config(tiny_config(family, **labels)).train()


def results(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return the loss, the logits of real tokens or of rows, and the gradients."""
    output = model(**batch)
    output.loss.backward()
    real = batch["attention_mask"].bool()
    found = [value for name, value in output.items() if name.endswith("logits")]
    logits = [one[real] if one.shape[:2] == real.shape else one for one in found]
    weights = model.named_parameters()
    return output.loss.detach(), [one.detach() for one in logits], {n: p.grad for n, p in weights if p.grad is not None}


@pytest.mark.each_value
@families
@pytest.mark.parametrize("task", HEADS)
def test_optimize_leaves_what_a_head_computes(family: str, task: str) -> None:
    batch = batch_of(family, task)
    expected = results(model_of(family, task), batch)
    model = whet.optimize(model_of(family, task), padding="all")
    found = results(model, batch)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)  # fp32 sums in another order
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, exact in expected[2].items():
        assert float((found[2][name] - exact).abs().max()) < 1e-5 * max(float(exact.abs().max()), 1.0), name


@pytest.mark.each_value
@families
@pytest.mark.parametrize("task", HEADS)
def test_optimize_in_bf16_keeps_outputs_in_fp32_and_learns(family: str, task: str) -> None:
    batch = batch_of(family, task)
    exact = results(model_of(family, task), batch)
    found = results(whet.optimize(model_of(family, task), dtype=torch.bfloat16, padding="all"), batch)
    assert {one.dtype for one in found[1]} == {torch.float32}
    torch.testing.assert_close(found[0], exact[0], rtol=0.03, atol=0)  # bf16 keeps 8 bits: 1 part in 256, a few times
    assert found[2].keys() == exact[2].keys()


@families
def test_optimize_leaves_choices_among_rows(family: str) -> None:
    """Multiple choice flattens (rows, choices, tokens) before the encoder."""
    need_head(AutoModelForMultipleChoice, family)
    batch = {name: value[None] for name, value in batch_of(family, "classes").items()} | {"labels": torch.tensor([2])}
    models = []
    for _ in range(2):
        torch.manual_seed(2)
        models.append(AutoModelForMultipleChoice.from_config(tiny_config(family)).eval())
    expected = models[0](**batch)
    found = whet.optimize(models[1])(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
