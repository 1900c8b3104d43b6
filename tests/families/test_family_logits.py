"""Packed batches of each family give the logits and gradients of the untouched model's padded ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tiny import FAMILIES, NO_AUTOCAST, arguments, masked_loss, padded, tiny_model, tiny_rows
from whet.data.store import RowStore
from whet.engine import step
from whet.precision.policy import BFloat16, Float32

# Logits are of size 0.5; each is rounded some dozen times in float32 on its way; seen: 4e-7.
FP32_TOLERANCE = 5e-6
# bf16 keeps 8 bits. Two correct computations of a result lie about as far from fp32 as each other, so the distance of
# transformers' own autocast from fp32 is the scale; the maximum of a few hundred roundings varies by a factor below 2.
BF16_FACTOR = 2.0

families = pytest.mark.parametrize("family", FAMILIES)
formats = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
pytestmark = pytest.mark.usefixtures("operators")


def trainer_of(folder: Path, family: str) -> Any:
    """Return a trainer whose model runs packed."""
    trainer = engine.Trainer(model=tiny_model(family), args=arguments(folder))
    assert trainer.objective.packed
    trainer.model.train()
    return trainer


def autocast(bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()


def padded_results(family: str, rows: RowStore, bf16: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the untouched model's logits of real tokens, and its gradients."""
    model = tiny_model(family).train()
    batch = padded(list(rows), model.config.pad_token_id)
    real = batch["attention_mask"].bool()
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    with autocast(bf16):
        output = model(**inputs)
        masked_loss(model, batch).backward()
    logits = [output.start_logits.detach()[real].float(), output.end_logits.detach()[real].float()]
    return logits, _gradients(model)


def packed_results(folder: Path, family: str, rows: RowStore, bf16: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the same of packed batches: logits of all rows in one, gradients of two micro-batches."""
    trainer = trainer_of(folder, family)
    objective, half = trainer.objective, len(rows) // 2
    batches = [objective.batch(rows, range(first, first + half), first) for first in (0, half)]
    precision = BFloat16(torch.device("cpu")) if bf16 else Float32()
    step.ObjectiveGradients(objective=objective, precision=precision, seed=0)(batches, 0)
    with autocast(bf16), torch.no_grad():
        batch = objective.batch(rows, range(len(rows)), 0)
        start, end, _ = objective.span_logits(objective.forward(batch, seed=0, step=0), batch)
    return [start.float(), end.float()], _gradients(trainer.model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@families
@pytest.mark.every_family
def test_packed_logits_and_gradients_equal_padded_in_fp32(tmp_path: Path, family: str) -> None:
    rows = tiny_rows(8, family)
    logits, gradients = packed_results(tmp_path, family, rows, bf16=False)
    expected_logits, expected = padded_results(family, rows, bf16=False)
    assert all(float(side.max() - side.min()) > 0.1 for side in expected_logits)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=FP32_TOLERANCE)
    assert gradients.keys() == expected.keys()
    for name, exact in expected.items():  # sums of hundreds of terms of size 0.1 and more; seen: 7e-7 of their size
        assert float((gradients[name] - exact).abs().max()) < 5e-6 * max(float(exact.abs().max()), 0.1), name


@families
def test_packed_logits_and_gradients_equal_padded_in_bf16(tmp_path: Path, family: str) -> None:
    """As near to fp32 as transformers' own autocast is."""
    if family in NO_AUTOCAST:
        pytest.skip(f"{family} of transformers does not run under bf16 autocast: its mask overflows")
    rows = tiny_rows(8, family)
    exact_logits, exact = padded_results(family, rows, bf16=False)
    their_logits, theirs = padded_results(family, rows, bf16=True)
    logits, gradients = packed_results(tmp_path, family, rows, bf16=True)
    assert _distance(logits, exact_logits) < BF16_FACTOR * _distance(their_logits, exact_logits)
    ours, others = ([one[name] for name in exact] for one in (gradients, theirs))
    assert _distance(ours, list(exact.values())) < BF16_FACTOR * _distance(others, list(exact.values()))


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the root of the mean squared error."""
    errors = torch.cat([(one.float() - other).flatten() for one, other in zip(found, exact, strict=True)])
    return float(errors.square().mean().sqrt())


@families
@formats
def test_changing_a_row_leaves_the_gradients_of_the_others_unmoved(tmp_path: Path, family: str, bf16: bool) -> None:
    """The loss counts all other rows, and its gradient is bitwise the same: no path leads through row 2."""
    rows, changed_row = tiny_rows(6, family), 2
    ids = rows.tokens["input_ids"].copy()
    inside = slice(rows.cu_seqlens[changed_row], rows.cu_seqlens[changed_row + 1])
    ids[inside] = ids[inside][::-1]  # the same words: the word table's gradient adds the same rows
    changed = RowStore(rows.cu_seqlens, dict(rows.tokens) | {"input_ids": ids}, rows.labels)
    found = [_gradient_of_others(tmp_path, family, one, changed_row, bf16) for one in (rows, changed)]
    assert found[0].keys() == found[1].keys()
    assert any(gradient.count_nonzero() for gradient in found[0].values())
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def _gradient_of_others(folder: Path, family: str, rows: RowStore, row: int, bf16: bool) -> dict[str, Tensor]:
    trainer = trainer_of(folder, family)
    batch = trainer.objective.batch(rows, range(len(rows)), 0)
    with autocast(bf16):
        start, end, cu_seqlens = trainer.objective.span_logits(trainer.objective.forward(batch, seed=0, step=0), batch)
    kept = torch.ones(len(start), dtype=torch.bool)
    kept[cu_seqlens[row] : cu_seqlens[row + 1]] = False
    (start[kept].float().square().sum() + end[kept].float().sum()).backward()
    return _gradients(trainer.model)
