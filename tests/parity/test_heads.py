"""Heads with their own loss: whole runs of the engine without padding, and of transformers' Trainer with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from padded_peers import HAS_ACCELERATE
from torch import Tensor
from torch.nn.functional import cross_entropy

from tiny import FAMILIES, need_head
from trained_heads import HEADS, SETTINGS, Head, collator, losses_of, model_of, rows_for, trainer_for

pytestmark = pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers' Trainer needs accelerate")

# Sums in float32 in another order, over 8 optimizer steps; seen: 2e-6. Another token in one sum moves it by 1e-3.
LOSSES = {"rtol": 1e-5, "atol": 1e-6}
# A logit is a sum of numbers as large as 3, which may cancel.
LOGITS = {"rtol": 1e-5, "atol": 1e-5}


def _sum_over_the_step(output: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """transformers' own heads leave `num_items_in_batch` aside, and take a mean of means (docs/trainer.md)."""
    return cross_entropy(output.logits.flatten(0, -2), labels.flatten(), reduction="sum") / num_items_in_batch


def _transformers(head: Head, family: str, out: Path) -> Any:
    model = model_of(head, family)
    model.accepts_loss_kwargs = head.by_token  # with it, transformers sums the means of the micro-batches
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(out), **SETTINGS),
        train_dataset=rows_for(head),
        data_collator=collator(family),
        compute_loss_func=_sum_over_the_step if head.by_token else None,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
def test_head_without_padding_trains_and_predicts_as_transformers(name: str, family: str, tmp_path: Path) -> None:
    head = HEADS[name]
    need_head(head.auto, family)
    theirs = _transformers(head, family, tmp_path / "theirs")
    expected = theirs.predict(rows_for(head, 12, 9))
    transformers.set_seed(7)  # its order of rows follows torch's global seed at this moment
    theirs.train()
    trainer = trainer_for(head, family, tmp_path / "ours")
    _require_equal(trainer.predict(rows_for(head, 12, 9)), expected, head)
    figures = trainer.train().metrics
    np.testing.assert_allclose(losses_of(trainer), losses_of(theirs), **LOSSES)
    assert len(losses_of(trainer)) == 8
    assert 0.1 < figures["train_padding_avoided"] < 0.6


def _require_equal(found: Any, expected: Any, head: Head) -> None:
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    real = found.predictions != -100
    assert real.mean() > 0.4
    np.testing.assert_allclose(found.predictions[real], expected.predictions[real], **LOGITS)
    if not head.by_token:  # transformers' evaluation takes the mean of its batches' means
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
