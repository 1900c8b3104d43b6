"""One model, or one encoder, that several Trainers and whet.optimize prepare, used in turn: each gives what it gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine
import whet
from tiny import FAMILIES_WITH_OWN_CODE, arguments, padded, tiny_model, tiny_rows

ROWS = 6


def trainer_of(folder: Path, model: Any, family: str) -> Any:
    rows = tiny_rows(ROWS, family)
    return engine.Trainer(model, arguments(folder, per_device_eval_batch_size=3), eval_dataset=rows)


def predicted(trainer: Any) -> Any:
    return trainer.predict(trainer.eval_dataset).predictions


@pytest.mark.parametrize("family", FAMILIES_WITH_OWN_CODE)
def test_two_trainers_of_a_model_evaluate_in_turn(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    first, second = (trainer_of(tmp_path / name, model, family) for name in "ab")
    before = predicted(first)
    for trainer in (second, first, second):
        for found, wanted in zip(predicted(trainer), before, strict=True):
            assert (found == wanted).all()


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("order", ["trainer-first", "optimize-first"])
def test_a_trainer_and_an_optimised_call_share_a_model(order: str, family: str, tmp_path: Path) -> None:
    model = tiny_model(family).eval()
    rows = tiny_rows(ROWS, family)
    batch = padded([{"input_ids": rows[n]["input_ids"]} for n in range(ROWS)], 0)
    with torch.no_grad():
        wanted = model(**batch).start_logits
    trainer = trainer_of(tmp_path, model, family) if order == "trainer-first" else None
    whet.optimize(model)
    trainer = trainer or trainer_of(tmp_path, model, family)
    before = predicted(trainer)
    for _ in range(2):
        with torch.no_grad():
            found = model(**batch).start_logits
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=5e-6)
        for one, other in zip(predicted(trainer), before, strict=True):
            assert (one == other).all()
