"""span_loss compound: start, end and joint cross entropy, against sums over all spans in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_bert
from torch import Tensor
from transformers import BertForSequenceClassification

import engine
import whet
from tiny import FAMILIES, arguments, losses, operators, padded, tiny_model, tiny_rows
from tiny_decoders import tiny_decoder
from whet.objectives.span import joint_cross_entropy

__all__ = ["operators"]

LENGTHS = (1, 7, 40)


def logits(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Start and end logits of packed rows, first and last places, and where rows begin."""
    numbers = torch.Generator().manual_seed(4)
    start, end = (scale * torch.randn(sum(LENGTHS), generator=numbers) for _ in range(2))
    first = torch.tensor([0, 2, 5])
    last = torch.tensor([0, 6, 5])
    return start, end, first, last, torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)


def by_all_spans(start: Tensor, end: Tensor, first: Tensor, last: Tensor, starts: Tensor) -> Tensor:
    """-log P of each row's span, every span written out."""
    found = []
    for row in range(len(LENGTHS)):
        a, b = int(starts[row]), int(starts[row + 1])
        scores = start[a:b, None] + end[None, a:b]
        spans = torch.stack([scores[i, j] for i in range(b - a) for j in range(i, b - a)])
        found.append(spans.logsumexp(0) - scores[first[row], last[row]])
    return torch.stack(found)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_joint_is_the_cross_entropy_among_all_spans(scale: float) -> None:
    """Values and gradients in float32; sums of exponentials of logits up to 100 round to a few of their last bits."""
    start, end, first, last, starts = logits(scale)
    one = [side.clone().requires_grad_() for side in (start, end)]
    other = [side.double().requires_grad_() for side in (start, end)]
    found = joint_cross_entropy(one[0], one[1], (first, last), starts)
    wanted = by_all_spans(other[0], other[1], first, last, starts)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * scale)
    weights = torch.tensor([0.3, 1.0, 2.0])
    (found * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    for mine, exact in zip(one, other, strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-5 * scale)


def trained(folder: Path, family: str = "bert", **changes: Any) -> engine.Trainer:
    usual: dict[str, Any] = {"max_steps": 3, "span_loss": "compound"}
    model = tiny_model(family)
    columns = padded(list(tiny_rows(12, family)), model.config.pad_token_id or 0)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(12)]
    trainer = engine.Trainer(model, arguments(folder, **(usual | changes)), train_dataset=rows)
    trainer.train()
    return trainer


@pytest.mark.usefixtures("operators")
def test_the_loss_is_half_the_sum_of_its_parts_which_are_logged(tmp_path: Path) -> None:
    logged = [entry for entry in trained(tmp_path).state.log_history if "loss" in entry]
    for entry in logged:
        parts = entry["start_loss"], entry["end_loss"], entry["joint_loss"]
        assert entry["loss"] == pytest.approx(sum(parts) / 2, rel=1e-6)
        assert parts[2] < parts[0] + parts[1], "spans that end before they begin have no probability"


def test_the_first_step_has_the_loss_that_all_spans_give(tmp_path: Path) -> None:
    rows, model = tiny_rows(4), tiny_model("bert")
    wanted = []
    for row in rows:
        tokens = {name: torch.tensor([row[name]]) for name in ("input_ids", "token_type_ids")}
        with torch.no_grad():
            out = model.eval()(**tokens)
        start, end = (side[0].double() for side in (out.start_logits, out.end_logits))
        first, last = row["start_positions"], row["end_positions"]
        pairs = start[:, None] + end[None]
        above = torch.ones_like(pairs).triu().bool()
        joint = pairs[above].logsumexp(0) - pairs[first, last]
        wanted.append((start.logsumexp(0) - start[first] + end.logsumexp(0) - end[last] + joint) / 2)
    args = arguments(tmp_path, max_steps=1, span_loss="compound", per_device_train_batch_size=4)
    trainer = engine.Trainer(tiny_model("bert"), args, train_dataset=rows)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-5)  # float32 passes


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_rows_have_one_curve(family: str, tmp_path: Path) -> None:
    without, with_padding = (
        losses(trained(tmp_path / str(attn), family, attn_implementation=attn)) for attn in (None, "eager")
    )
    assert without == pytest.approx(with_padding, rel=1e-5)  # sums in another order
    assert all(map(math.isfinite, without))


@pytest.mark.parametrize("padding", ["sampled", "all"])
def test_padding_counts_in_start_and_end_alone(padding: Any, tmp_path: Path) -> None:
    with_padding, without = (
        trained(tmp_path / name, max_steps=1, padding_in_loss=name).state.log_history[0] for name in (padding, "none")
    )
    assert with_padding["joint_loss"] == pytest.approx(without["joint_loss"], rel=1e-5)
    assert with_padding["start_loss"] > without["start_loss"] * 1.001


def test_a_span_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    rows = [dict(row) for row in tiny_rows(4)]
    rows[2] |= {"start_positions": 3, "end_positions": 1}
    for attn in (None, "eager"):
        args = arguments(tmp_path, max_steps=1, span_loss="compound", attn_implementation=attn)
        trainer = engine.Trainer(tiny_model("bert"), args, train_dataset=rows)
        with pytest.raises(whet.DataError, match="the answer in row 2 of the data set ends before it begins"):
            trainer.train()


def test_models_without_spans_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, span_loss="compound")
    with pytest.raises(whet.ConfigError, match=r"(?s)span_loss compound does not go.*BertForSequenceClassification"):
        engine.Trainer(tiny_bert(BertForSequenceClassification), args)


@pytest.mark.parametrize("amount", ["all", "sampled"])
def test_padding_is_not_counted_in_a_loss_without_spans(amount: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, padding_in_loss=amount)
    for model in (tiny_bert(BertForSequenceClassification), tiny_decoder("llama")):
        with pytest.raises(whet.ConfigError, match=f"padding_in_loss {amount} would change nothing") as caught:
            engine.Trainer(model, args)
        assert caught.value.problems[0].got == type(model).__name__
