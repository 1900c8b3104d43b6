"""What fills a packed batch up to a size that comes again changes nothing of what is learnt or predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from tiny import FAMILIES, arguments, losses, operators, tiny_model, tiny_rows, weights_of
from whet.data import batch as batches

__all__ = ["operators"]

TOLERANCE = 1e-6  # sums of float32 over tokens, split in another way


def _run(folder: Path, family: str) -> engine.Trainer:
    trainer = engine.Trainer(
        model=tiny_model(family, dropout=0.1),
        args=arguments(folder, max_steps=10, per_device_train_batch_size=8, optim="sgd", learning_rate=0.05),
        train_dataset=tiny_rows(40, family),
    )
    trainer.train()
    return trainer


@pytest.mark.each_value
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_weights_and_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    filled, rows = _run(tmp_path, family), tiny_rows(9, family, seed=3)
    one = filled.objective.batch(filled.train_dataset, range(8), 0)
    assert one.n_computed > one.n_tokens
    found = filled.predict(rows)
    monkeypatch.setattr(batches, "filled_length", lambda n_tokens: n_tokens)
    bare = _run(tmp_path, family)
    wanted = bare.predict(rows)
    assert losses(filled) == pytest.approx(losses(bare), rel=TOLERANCE)
    after = weights_of(bare.model)
    for name, value in weights_of(filled.model).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-6, msg=name)
    for one, other in zip(found.predictions, wanted.predictions, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
