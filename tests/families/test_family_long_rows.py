"""Rows beyond every window, and beyond the last bucket of every bias by distance, equal the untouched model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine
from tiny import FAMILIES, arguments, padded, tiny_model, tiny_rows

# As in test_family_logits.py; attention sums ten times as many terms. Seen: 1e-6.
TOLERANCE = 1e-5
LENGTHS = (150, 300)
"""MPNet's last bucket begins at a distance of 128."""


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("family", FAMILIES)
def test_long_rows_equal_the_untouched_models(tmp_path: Path, family: str) -> None:
    model, untouched = (tiny_model(family, max_position_embeddings=310).train() for _ in range(2))
    trainer = engine.Trainer(model=model, args=arguments(tmp_path))
    rows = tiny_rows(4, family, lengths=LENGTHS)
    batch = padded(list(rows), untouched.config.pad_token_id)
    objective, real = trainer.objective, batch["attention_mask"].bool()
    one = objective.batch(rows, range(len(rows)), 0)
    start, end, _ = objective.span_logits(objective.forward(one, seed=0, step=0), one)
    output = untouched(**{name: value for name, value in batch.items() if not name.endswith("_positions")})
    expected = [output.start_logits[real], output.end_logits[real]]
    torch.testing.assert_close([start, end], expected, rtol=0, atol=TOLERANCE)
    (start.square().sum() + end.square().sum()).backward()
    sum(side.square().sum() for side in expected).backward()
    for (name, ours), theirs in zip(trainer.model.named_parameters(), untouched.parameters(), strict=True):
        if theirs.grad is None or not theirs.grad.any():
            continue
        scale = float(theirs.grad.abs().max())
        assert float((ours.grad - theirs.grad).abs().max()) < 1e-4 * max(scale, 0.1), name
