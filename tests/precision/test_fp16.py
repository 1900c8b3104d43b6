"""fp16: losses are scaled so that small gradients stay above zero, and a scale that is too high falls by itself."""

from __future__ import annotations

import json
import logging
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import engine
from tiny import arguments, losses, tiny_model, tiny_rows, weights_of
from whet.errors import NonFiniteError

_HIGHEST = 65504.0  # of fp16


class Steep(nn.Module):
    """Its loss is so steep that its gradient leaves fp16 until the scale has fallen; `spoil` ruins it for good."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.dropout, self.head = nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1)
        self.spoil = spoil

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.hidden(x)))).squeeze(-1)
        loss = ((logits - 400 * labels) ** 2).mean()
        if self.spoil == "gradient":  # the root of 0 is 0, its slope infinite
            loss = loss + (0.0 * self.head.weight.sum()).sqrt()
        return {"loss": loss * float("nan") if self.spoil == "loss" else loss}


class Watch(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))


def _steep(folder: Path, spoil: str = "", **changes: Any) -> engine.Trainer:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(7))
    rows = [{"x": row, "labels": row.sum()} for row in x]
    usual = {"fp16": True, "num_train_epochs": 4, "warmup_steps": 0}
    callbacks = changes.pop("callbacks", None)
    args = arguments(folder, **(usual | changes))
    return engine.Trainer(model=Steep(spoil), args=args, train_dataset=rows, callbacks=callbacks)


def _scale(trainer: engine.Trainer) -> float:
    return trainer.precision.current.state()["scale"]


@pytest.mark.parametrize("before", ["fp32", "bf16"])
def test_fp16_begins_with_its_usual_scale_where_another_format_ended(tmp_path: Path, before: str) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "fp16": False}
    _steep(tmp_path, precision=before, max_steps=2, **saving).train()
    resumed = _steep(tmp_path, max_steps=40, resume_allow_changes=("precision",))
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 40
    assert 1.0 <= _scale(resumed) < 65536.0  # where torch begins; its gradients are too steep for that


@pytest.mark.slow
@pytest.mark.usefixtures("operators")
def test_fp16_learns_like_fp32(tmp_path: Path) -> None:
    runs = {}
    for precision in ("fp32", "fp16"):
        model, seen = tiny_model("bert", dropout=0.1), []
        model.qa_outputs.register_forward_hook(lambda _module, _given, out, seen=seen: seen.append(out.dtype))
        # With this seed no step overflows: a step that lowers the scale and is left out makes it another run.
        args = arguments(tmp_path, precision=precision, max_steps=40, learning_rate=1e-3, seed=3)
        trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(48))
        assert "train_steps_not_applied" not in trainer.train().metrics
        runs[precision] = trainer
        assert set(seen) == {torch.float16 if precision == "fp16" else torch.float32}
        assert {value.dtype for value in weights_of(model).values()} == {torch.float32}
    # 11 bits a product against 24, over 40 steps of a run that falls to less than half of its loss; seen: 2e-4.
    assert losses(runs["fp16"]) == pytest.approx(losses(runs["fp32"]), rel=0.002)
    assert losses(runs["fp16"])[-1] < losses(runs["fp16"])[0] / 2
    norms = [[entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry] for run in runs.values()]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)  # without the scale: clipping sees what fp32 sees


def test_fp16_overflow_lowers_the_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More overflows in a row than non-finite steps may be; then it learns."""
    caplog.set_level(logging.INFO, logger="whet")
    seen = Watch()
    trainer = _steep(tmp_path, callbacks=[seen])
    first = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    trainer.train()
    falls = [text for text in caplog.messages if "the loss scale falls" in text]
    n_falls = len(falls)
    assert n_falls > 3
    assert falls[0] == "fp16: a gradient overflowed; the loss scale falls from 65536 to 32768"
    assert _scale(trainer) == 65536.0 / 2**n_falls
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    stood = [after.equal(before) for before, after in pairwise([first, *seen.weights])]
    assert stood == [not math.isfinite(norm) for norm in norms]
    assert sum(stood) == n_falls
    assert stood[:4] == [True] * 4
    assert not any("was not applied" in text for text in caplog.messages)
    assert all(value == value for value in losses(trainer))
    assert trainer.state.global_step == 24


@pytest.mark.parametrize("at", [3, 9])
def test_fp16_run_resumes_bitwise_with_its_scale(tmp_path: Path, at: int) -> None:
    """Saved while the scale falls, and after."""
    saving = {"save_strategy": "steps", "save_steps": at}
    whole = _steep(tmp_path / "whole", **saving)
    whole.train()
    folder = tmp_path / "whole" / f"checkpoint-{at}"
    kept = json.loads((folder / "state.json").read_text("utf-8"))["precision"]
    assert kept["scale"] < 65536.0
    resumed = _steep(tmp_path / "again", **saving)
    resumed.train(resume_from_checkpoint=str(folder))
    assert losses(resumed) == losses(whole)
    assert resumed.precision.current.state() == whole.precision.current.state()
    for name, value in weights_of(whole.model).items():
        assert weights_of(resumed.model)[name].equal(value), name


def test_gradient_beyond_any_scale_ends_the_run(tmp_path: Path) -> None:
    """16 halvings from 65536 to 1, then three steps that count."""
    trainer = _steep(tmp_path, "gradient")
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.train()
    assert trainer.state.global_step == 16 + 3


def test_nan_loss_does_not_lower_the_scale(tmp_path: Path) -> None:
    trainer = _steep(tmp_path, "loss")
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_second_run_begins_with_a_new_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    trainer = _steep(tmp_path)
    for _ in range(2):
        trainer.train()
    assert sum("falls from 65536 to 32768" in text for text in caplog.messages) == 2


def test_accumulated_batches_share_one_scale(tmp_path: Path) -> None:
    whole = _steep(tmp_path, train_sampling_strategy="sequential")
    split = _steep(
        tmp_path, train_sampling_strategy="sequential", per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    for trainer in (whole, split):
        trainer.model.dropout.p = 0.0  # plain dropout is drawn anew for each batch
        trainer.train()
    assert _scale(split) == _scale(whole)
    # gradients of 2 rows and of 4 are rounded to fp16's 11 bits at different places
    assert losses(split) == pytest.approx(losses(whole), rel=2e-3)


def test_highest_fp16_number_equals_that_of_the_help() -> None:
    assert torch.finfo(torch.float16).max == _HIGHEST
