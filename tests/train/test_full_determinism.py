"""full_determinism: the same bits again, or a refusal, in training and in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Toy, arguments, assert_same_weights, span_rows, tiny_bert, toy_trainer

import engine


class Unsteady(Toy):
    """Takes a maximum over windows, whose backward pass torch cannot repeat bitwise."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        assert torch.are_deterministic_algorithms_enabled() == self.expected
        return super().forward(x, labels)

    expected = True


@pytest.mark.parametrize("wanted", [True, False])
def test_full_determinism_lasts_while_the_trainer_works(tmp_path: Path, wanted: bool) -> None:
    model = Unsteady()
    model.expected = wanted
    trainer = toy_trainer(tmp_path, model=model, full_determinism=wanted)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert not torch.are_deterministic_algorithms_enabled()


def test_full_determinism_refuses_what_torch_cannot_repeat(tmp_path: Path) -> None:
    class Pooled(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            x = x + torch.nn.functional.adaptive_max_pool2d(x[None, None], (len(x), 2)).mean() * 0
            put = torch.zeros(3).put_(torch.tensor([0, 0]), x[0, :2].detach(), accumulate=False)
            return super().forward(x + put.sum() * 0, labels)

    toy_trainer(tmp_path / "a", model=Pooled()).train()
    with pytest.raises(RuntimeError, match="deterministic"):
        toy_trainer(tmp_path / "b", model=Pooled(), full_determinism=True).train()


def test_full_determinism_changes_nothing_of_packed_runs(tmp_path: Path) -> None:
    """whet's operators repeat bitwise on a CPU without it."""
    found = []
    for wanted in (False, True):
        trainer = engine.Trainer(
            tiny_bert(hidden_dropout_prob=0.1), arguments(tmp_path, full_determinism=wanted), train_dataset=span_rows()
        )
        trainer.train()
        found.append(trainer.model)
    assert_same_weights(found[0], found[1])
