"""A loss of several parts: each part is logged next to the loss, averaged as the loss is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Toy, arguments, assert_same_weights, entries, read_json, toy_rows, toy_trainer
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, default_data_collator

import engine

_LENGTHS = (3, 5, 7, 4)
"""Labelled tokens of the rows: two micro-batches have different numbers of targets."""


def _experts(**changes: Any) -> MixtralForCausalLM:
    """A mixture of experts of transformers whose router has a loss of its own; the same each time."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        **({"output_router_logits": True, "router_aux_loss_coef": 0.1} | changes),
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _word_rows() -> list[dict[str, Tensor]]:
    rows = torch.randint(0, 40, (len(_LENGTHS), 8), generator=torch.Generator().manual_seed(1))
    labels = [torch.where(torch.arange(8) <= n, row, -100) for row, n in zip(rows, _LENGTHS, strict=True)]
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def _expert_trainer(folder: Path, kind: type[engine.Trainer] = engine.Trainer, **changes: Any) -> engine.Trainer:
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    args = arguments(folder, **(settings | changes))
    return kind(model=_experts(), args=args, train_dataset=_word_rows(), data_collator=default_data_collator)


def _first_step_by_hand() -> tuple[list[float], list[float], list[int]]:
    """Loss, router loss and number of targets of the two micro-batches of the first step."""
    losses, router, counts = [], [], []
    model = _experts().train()
    for rows in (_word_rows()[:2], _word_rows()[2:]):
        batch = default_data_collator(rows)
        output = model(**batch)
        losses.append(output.loss.item())
        router.append(output.aux_loss.item())
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))
    return losses, router, counts


class TwoParts(Toy):
    """A `Toy` whose loss is the sum of two parts that it returns."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(x, labels)
        size = (output["logits"] ** 2).mean()
        return output | {"loss": output["loss"] + 0.1 * size, "fit_loss": output["loss"], "size_loss": size}


class OnePart(TwoParts):
    """The same loss without its parts."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(x, labels)
        return {"loss": output["loss"], "logits": output["logits"]}


def test_router_loss_of_experts_is_logged(tmp_path: Path) -> None:
    trainer = _expert_trainer(tmp_path, max_steps=2)
    trainer.train()
    losses, router, counts = _first_step_by_hand()
    mean = sum(loss * n for loss, n in zip(router, counts, strict=True)) / sum(counts)
    total = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    logged, logged_total = entries(trainer, "aux_loss"), entries(trainer, "loss")
    # Sums of two float32 numbers in another order.
    assert logged[0] == (1, pytest.approx(mean, rel=1e-6))
    assert logged_total[0] == (1, pytest.approx(total, rel=1e-6))
    assert [step for step, _ in logged] == [1, 2]
    assert logged[1][1] != logged[0][1]


def test_router_loss_is_a_metric_of_an_evaluation(tmp_path: Path) -> None:
    trainer = _expert_trainer(tmp_path, per_device_eval_batch_size=2)
    losses, router, counts = _first_step_by_hand()
    found = trainer.evaluate(_word_rows())
    for name, values in (("eval_loss", losses), ("eval_aux_loss", router)):
        mean = sum(value * n for value, n in zip(values, counts, strict=True)) / sum(counts)
        assert found[name] == pytest.approx(mean, rel=1e-6)  # the model has no dropout: training and evaluation agree


def test_router_loss_is_not_logged_without_router_logits(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_steps=1)
    trainer = engine.Trainer(model=_experts(output_router_logits=False), args=args, train_dataset=_word_rows())
    trainer.train()
    assert entries(trainer, "loss")
    assert not entries(trainer, "aux_loss")


def test_parts_are_means_over_the_interval(tmp_path: Path) -> None:
    each = toy_trainer(tmp_path / "each", model=TwoParts(), logging_steps=1)
    third = toy_trainer(tmp_path / "third", model=TwoParts(), logging_steps=3)
    each.train()
    third.train()
    for name in ("loss", "fit_loss", "size_loss"):
        values = [value for _, value in entries(each, name)]
        assert len(values) == 3
        assert entries(third, name) == [(3, sum(values) / 3)]
    for fit, size, loss in zip(*(entries(each, name) for name in ("fit_loss", "size_loss", "loss")), strict=True):
        assert loss[1] == pytest.approx(fit[1] + 0.1 * size[1], rel=1e-6)  # one float32 rounding


def test_parts_change_nothing_in_the_training(tmp_path: Path) -> None:
    two = toy_trainer(tmp_path / "two", model=TwoParts(), logging_steps=1, gradient_accumulation_steps=2)
    one = toy_trainer(tmp_path / "one", model=OnePart(), logging_steps=1, gradient_accumulation_steps=2)
    two.train()
    one.train()
    assert entries(two, "loss") == entries(one, "loss")
    assert_same_weights(two.model, one.model)
    assert not entries(one, "fit_loss")


def test_parts_after_a_resume_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """The run stops in the middle of a logging interval: what the interval has so far is in the checkpoint."""
    settings: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 3, "save_strategy": "steps", "save_steps": 5}
    complete = toy_trainer(tmp_path / "a", model=TwoParts(), **settings)
    complete.train()
    resumed = toy_trainer(tmp_path / "b", model=TwoParts(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert len(entries(complete, "fit_loss")) == 2
    for name in ("loss", "fit_loss", "size_loss"):
        assert entries(resumed, name) == entries(complete, name)
    history = read_json(tmp_path / "b" / "checkpoint-6" / "trainer_state.json")["log_history"]
    assert [entry["size_loss"] for entry in history if "size_loss" in entry] == [
        value for _, value in entries(complete, "size_loss")
    ]


def test_parts_are_printed_in_the_lines_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_trainer(tmp_path, model=TwoParts(), logging_steps=3, train_dataset=toy_rows(12)).train()
    printed = capsys.readouterr().out
    assert "fit_loss" in printed
    assert "size_loss" in printed
