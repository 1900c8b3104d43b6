"""Parameters that a callback unfreezes during the training: as with transformers' Trainer, and never in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from override_runs import ours, pad, theirs, token_rows
from tiny_runs import tiny_bert, weights_of
from transformers import BertForSequenceClassification, TrainerCallback

import engine


def _model() -> Any:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    model = tiny_bert(BertForSequenceClassification, **still)
    model.bert.requires_grad_(False)
    return model


class Unfreezes(TrainerCallback):
    """Unfreezes the encoder after the second step; with `freezes`, it is also what freezes it at the beginning."""

    def __init__(self, *, freezes: bool = False) -> None:
        self._freezes = freezes

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if self._freezes:
            model.bert.requires_grad_(False)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            model.bert.requires_grad_(True)


def _run(base: Any, args: Any, *callbacks: Any, **given: Any) -> Any:
    trainer = base(_model(), args, pad, token_rows(24), callbacks=list(callbacks), **given)
    trainer.train()
    return trainer


def _figures(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("optim", ["adamw_torch", "auto"])
def test_unfrozen_parameters_count_when_clipping_and_are_reported(
    tmp_path: Path, optim: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses and norms are those of transformers; a norm of 0.05 clips every step."""
    caplog.set_level("WARNING", logger="whet")
    mine = _run(engine.Trainer, ours(tmp_path / "a", max_grad_norm=0.05, optim=optim), Unfreezes())
    other = _run(transformers.Trainer, theirs(tmp_path / "b", max_grad_norm=0.05), Unfreezes())
    assert _figures(mine, "loss") == pytest.approx(_figures(other, "loss"), rel=1e-4)  # sums in another order
    assert _figures(mine, "grad_norm") == pytest.approx(_figures(other, "grad_norm"), rel=1e-3)
    before = _model().state_dict()
    assert all(torch.equal(one, before[name]) for name, one in weights_of(mine.model).items() if "bert." in name)
    told = [record.message for record in caplog.records if "are not trained" in record.message]
    assert len(told) == 1
    assert "bert.embeddings" in told[0]
    assert all(parameter.grad is None for parameter in mine.model.parameters())


@pytest.mark.parametrize("optim", ["adamw_torch", "auto"])
def test_parameters_that_are_frozen_at_the_begin_of_the_training_are_trained_later(
    tmp_path: Path, optim: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The way that the warning names."""
    found = []
    for base, args in (
        (engine.Trainer, ours(tmp_path / "a", optim=optim)),
        (transformers.Trainer, theirs(tmp_path / "b")),
    ):
        model = _model()
        model.requires_grad_(True)
        trainer = base(model, args, pad, token_rows(24), callbacks=[Unfreezes(freezes=True)])
        trainer.train()
        found.append(_figures(trainer, "loss"))
        assert not torch.equal(model.bert.pooler.dense.weight, _model().bert.pooler.dense.weight)
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # a rate of 1e-2 makes rounding grow
    assert "are not trained" not in caplog.text


def test_parameters_of_a_given_optimizer_are_clipped_once_unfrozen(tmp_path: Path) -> None:
    """An optimizer over all parameters, some of them frozen at the start."""
    figures = []
    for base, args in (
        (engine.Trainer, ours(tmp_path / "a", max_grad_norm=0.05)),
        (transformers.Trainer, theirs(tmp_path / "b", max_grad_norm=0.05)),
    ):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer = base(model, args, pad, token_rows(24), callbacks=[Unfreezes()], optimizers=(optimizer, None))
        trainer.train()
        figures.append(_figures(trainer, "loss"))
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
