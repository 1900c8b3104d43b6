"""Embeddings that add a table of a kind of their own: the fused sum knows words, positions and segments alone."""

from __future__ import annotations

import copy

import pytest
import torch
from changed import batch_of
from transformers import AutoModelForSequenceClassification

import whet
from tiny import tiny_config


@pytest.mark.usefixtures("operators")
def test_a_table_that_the_fused_sum_does_not_know_is_added() -> None:
    """Released models of ERNIE have a table of tasks; its usual configuration has none."""
    config = tiny_config("ernie", use_task_id=True, task_type_vocab_size=3)
    model, batch = AutoModelForSequenceClassification.from_config(config).eval(), batch_of("ernie")
    with torch.no_grad():
        model.ernie.embeddings.task_type_embeddings.weight.normal_()
        wanted = model(**batch).logits
        optimized = whet.optimize(copy.deepcopy(model))
        torch.testing.assert_close(optimized(**batch).logits, wanted, rtol=1e-4, atol=1e-5)
        optimized.ernie.embeddings.task_type_embeddings.weight.zero_()
        assert not torch.allclose(optimized(**batch).logits, wanted, atol=1e-3)
