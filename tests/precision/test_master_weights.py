"""Weights are fp32 in every precision, also where they came in bf16 or fp16; the log says what is in which format."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import engine
from tiny import arguments, losses, tiny_model, tiny_rows, weights_of
from whet.models.loading.load import ModelSource, load_qa_model


def _trainer(folder: Path, model: Any, **changes: Any) -> engine.Trainer:
    optimizers = changes.pop("optimizers", (None, None))
    args = arguments(folder, max_steps=4, **changes)
    return engine.Trainer(model=model, args=args, train_dataset=tiny_rows(16), optimizers=optimizers)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_model_is_trained_in_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: torch.dtype, precision: str
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    model = tiny_model("bert").to(stored)
    parameters = list(model.parameters())
    raised = {name: value.float() if value.is_floating_point() else value for name, value in weights_of(model).items()}
    trainer = _trainer(tmp_path, model, precision=precision)
    assert all(value.equal(raised[name]) for name, value in weights_of(model).items())
    assert [id(one) for one in trainer.model.parameters()] == [id(one) for one in parameters]
    name = "bf16" if stored == torch.bfloat16 else "fp16"
    said = f"weights came in {name} and are trained in fp32"
    assert any(said in one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)  # is shown
    trainer.train()
    assert {value.dtype for value in weights_of(model).values()} == {torch.float32}
    trainer.save_model()
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_small_updates_are_not_lost(tmp_path: Path) -> None:
    """At a rate of 1e-5 a step moves a weight by less than bf16 can show; four of them still move all that learn."""
    model = tiny_model("bert").bfloat16()
    before = weights_of(model)["qa_outputs.weight"].float()
    _trainer(tmp_path, model, bf16=True, learning_rate=1e-5, warmup_steps=0).train()
    after = weights_of(model)["qa_outputs.weight"]
    assert after.ne(before).all()
    assert after.bfloat16().float().eq(before).float().mean() > 0.5  # in bf16, most would be where they were


def test_existing_optimizer_still_works(tmp_path: Path) -> None:
    model = tiny_model("bert").bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: value.float() for name, value in weights_of(model).items()}
    _trainer(tmp_path, model, optimizers=(optimizer, None)).train()
    assert weights_of(model)["qa_outputs.weight"].ne(before["qa_outputs.weight"]).any()
    assert {value.dtype for values in optimizer.state.values() for value in values.values()} == {torch.float32}


def test_bf16_checkpoint_is_loaded_into_fp32(tmp_path: Path) -> None:
    model = tiny_model("bert").bfloat16()
    model.save_pretrained(tmp_path / "stored")
    loaded = load_qa_model(ModelSource(model=str(tmp_path / "stored")))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    runs = [_trainer(tmp_path, one) for one in (loaded, model)]  # by the loader, and by the Trainer
    for run in runs:
        run.train()
    assert losses(runs[0]) == losses(runs[1])


def test_double_precision_is_kept(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, tiny_model("bert").double())
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float64}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_names_the_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    model = tiny_model("bert")
    _trainer(tmp_path, model, precision=precision).train()
    n_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    weights, state = f"{n_bytes / 1e6:.4g}", f"{2 * n_bytes / 1e6:.4g}"  # AdamW keeps two numbers a weight
    wanted = f"weights fp32 ({weights} MB), products {precision}, optimizer state fp32 ({state} MB)"
    assert caplog.messages.count(wanted) == 1
