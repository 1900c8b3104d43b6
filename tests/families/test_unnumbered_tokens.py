"""Families that count positions from the padding token: it has no position of its own, in the middle of a row too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_family_logits import FP32_TOLERANCE
from torch import Tensor

import engine
import whet
from tiny import arguments, padded, tiny_model, tiny_rows
from whet.data.store import RowStore
from whet.models.known import known

FAMILIES = [name for name, family in known().items() if family.skips_padding]
cases = pytest.mark.parametrize(
    ("changes", "later"),
    [({}, {}), ({"pad_token_id": 3}, {}), ({}, {"pad_token_id": 0})],
    ids=["usual padding", "another padding token", "configuration changed after loading"],
)
pytestmark = [pytest.mark.usefixtures("operators"), pytest.mark.parametrize("family", FAMILIES)]


@cases
def test_optimized_model_numbers_tokens_as_the_untouched_one(
    family: str, changes: dict[str, int], later: dict[str, int]
) -> None:
    """transformers' own Trainer changes the configuration: the tokenizer's padding token may be another one."""
    model, batch = _model_and_batch(family, changes, later)
    wanted, found = model(**batch), whet.optimize(copy.deepcopy(model))(**batch)
    _require_same(found.start_logits, wanted.start_logits, batch)


@cases
@pytest.mark.parametrize("padding_in_loss", ["none", "sampled", "all"])
def test_packed_rows_are_numbered_as_padded_ones(
    tmp_path: Path, family: str, changes: dict[str, int], later: dict[str, int], padding_in_loss: str
) -> None:
    model, batch = _model_and_batch(family, changes, later)
    wanted = model(**batch)
    args = arguments(tmp_path, padding_in_loss=padding_in_loss)
    trainer = engine.Trainer(model=copy.deepcopy(model), args=args, eval_dataset=list(_rows(model)))
    assert trainer.objective.packed
    start, _ = trainer.predict(list(_rows(model))).predictions
    _require_same(torch.from_numpy(start), wanted.start_logits, batch)
    if padding_in_loss == "all":  # the softmax over all places of padded rows, whose padding is numbered, or not
        exact = float(model(**batch, **_answers(model)).loss.detach())
        assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-5)


def _model_and_batch(family: str, changes: dict[str, int], later: dict[str, int]) -> tuple[Any, dict[str, Tensor]]:
    model = tiny_model(family, **changes).eval()
    for name, value in later.items():
        setattr(model.config, name, value)
    batch = padded(list(_rows(model)), model.config.pad_token_id)
    return model, {name: value for name, value in batch.items() if not name.endswith("_positions")}


def _rows(model: Any) -> RowStore:
    """Return rows in which the token without a position stands once, twice, at the end, and not at all."""
    rows, unnumbered = tiny_rows(4, lengths=(9, 20)), known()[model.config.model_type].unnumbered(model.base_model)
    for place in (3, rows.cu_seqlens[1] + 2, rows.cu_seqlens[1] + 6, rows.cu_seqlens[3] - 1):
        rows.tokens["input_ids"][place] = unnumbered
    del rows.tokens["token_type_ids"]
    return rows


def _answers(model: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(label) for name, label in _rows(model).labels.items()}


def _require_same(found: Tensor, wanted: Tensor, batch: dict[str, Tensor]) -> None:
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found.detach()[real], wanted.detach()[real], rtol=0, atol=FP32_TOLERANCE)
