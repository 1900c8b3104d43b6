"""Gradients that a callback or an optimizer keeps from step to step stay what they were, as under transformers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForSequenceClassification, TrainerCallback

import engine
import whet
from tiny import padded, tiny_config

N_STEPS = 4


class Keep(TrainerCallback):
    """Keeps the gradient of the word table of each step: itself, or a view of it."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.kept: list[Tensor] = []
        self.copies: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        gradient = model.get_input_embeddings().weight.grad
        self.kept.append({"itself": gradient, "detached": gradient.detach(), "view": gradient[3:]}[self.how])
        self.copies.append(self.kept[-1].clone())


class Optimistic(torch.optim.Optimizer):
    """p -= rate (2 g - g_before): the optimistic gradient (Daskalakis et al. 2018), which keeps the tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    before = self.state[one].get("before", torch.zeros_like(one))
                    one.add_(2 * one.grad - before, alpha=-group["lr"])
                    self.state[one]["before"] = one.grad


def start() -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(tiny_config("bert"))


def trained(library: Any, folder: Path, **given: Any) -> Any:
    rows = [{"input_ids": [2, 15 + i, 17 + 2 * i, 3] + [19] * (i % 4), "labels": i % 2} for i in range(8)]
    args = library.TrainingArguments(
        str(folder), max_steps=N_STEPS, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, report_to=[],
        save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant", optim="adamw_torch",
    )  # fmt: skip
    trainer = library.Trainer(args=args, train_dataset=rows, data_collator=_collate, **given)
    trainer.train()
    return trainer.model


def _collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    wide = padded([{"input_ids": row["input_ids"]} for row in rows], 0)
    return wide | {"labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.parametrize("how", ["itself", "detached", "view"])
def test_a_callback_keeps_the_gradients_of_earlier_steps(tmp_path: Path, how: str) -> None:
    keep = Keep(how)
    trained(whet, tmp_path, model=start(), callbacks=[keep])
    assert len(keep.kept) == N_STEPS
    for kept, copy in zip(keep.kept, keep.copies, strict=True):
        assert torch.equal(kept, copy)
    assert not torch.equal(keep.copies[0], keep.copies[1])


def test_an_optimizer_that_keeps_gradients_trains_as_under_transformers(tmp_path: Path) -> None:
    weights = []
    for library in (transformers, whet):
        model = start()
        trained(library, tmp_path, model=model, optimizers=(Optimistic(model.parameters()), None))
        weights.append(model.get_input_embeddings().weight.detach())
    moved = float((weights[0] - start().get_input_embeddings().weight.detach()).abs().max())
    assert moved > 1e-4
    assert float((weights[0] - weights[1]).abs().max()) < 1e-3 * moved  # float32 sums in another order, four steps


def test_a_gradient_that_nobody_keeps_stays_in_its_memory(tmp_path: Path) -> None:
    """A table is large: a new gradient each step would cost more than its rows in use."""
    places: list[int] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            places.append(model.get_input_embeddings().weight.grad.data_ptr())

    model = deepcopy(start())
    trained(engine, tmp_path, model=model, callbacks=[Look()])
    assert len(places) == N_STEPS
    assert len(set(places)) == 1
