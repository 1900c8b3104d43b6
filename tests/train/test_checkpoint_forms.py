"""The form of a checkpoint: parameters by name, and every part of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.tiny_runs import Toy, toy_trainer
from transformers import EarlyStoppingCallback

import engine
import whet
from whet.store.manifest import digest_of

_RUN: dict[str, Any] = {
    "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2,
    "logging_steps": 3, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "train_sampling_strategy": "random",
    "seed": 5, "precision": "fp32", "max_loss_spike": 50.0,
}  # fmt: skip


def _trainer(folder: Path, **changes: Any) -> engine.Trainer:
    return toy_trainer(folder, model=Toy(dropout=0.1), **(_RUN | changes))


def test_moments_have_the_names_and_shapes_of_the_parameters(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.train()
    moments = load_file(tmp_path / "checkpoint-4" / "optimizer.safetensors")
    shapes = {name: tuple(parameter.shape) for name, parameter in trainer.model.named_parameters()}
    for moment in ("exp_avg", "exp_avg_sq"):
        assert {name: tuple(moments[f"state.{name}.{moment}"].shape) for name in shapes} == shapes
    state = json.loads((tmp_path / "checkpoint-4" / "state.json").read_text())
    assert sorted(name for group in state["optimizer"]["param_groups"] for name in group["params"]) == sorted(shapes)


def test_parameters_in_another_order_get_their_own_moments(tmp_path: Path) -> None:
    """Names decide: the same optimizer over parameters in another order is refused, and never mixed up."""

    def optimizer(model: torch.nn.Module, *, reverse: bool) -> torch.optim.Optimizer:
        parameters = [model.get_parameter(f"norm.{name}") for name in ("weight", "bias")]
        others = [one for one in model.parameters() if all(one is not other for other in parameters)]
        return torch.optim.AdamW([*(parameters[::-1] if reverse else parameters), *others], lr=1e-2)

    model = Toy()
    toy_trainer(
        tmp_path, model=model, optimizers=(optimizer(model, reverse=False), None), save_strategy="steps", save_steps=2
    ).train()
    other = Toy()
    again = toy_trainer(
        tmp_path, model=other, optimizers=(optimizer(other, reverse=True), None), save_strategy="steps", save_steps=2
    )
    with pytest.raises(whet.WhetError, match="holds other parameters"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_patience_of_early_stopping_counts_on_after_a_resume(tmp_path: Path) -> None:
    """An evaluation that is no better before the stop counts, as it would have without one."""
    ended = {}
    for way in ("whole", "resumed"):
        changes = {
            "num_train_epochs": 4, "eval_steps": 1, "save_steps": 3, "metric_for_best_model": "loss",
            "greater_is_better": True, "learning_rate": 1e-3, "load_best_model_at_end": False,
        }  # fmt: skip
        folder = tmp_path / way
        if way == "resumed":
            shutil.copytree(tmp_path / "whole" / "checkpoint-3", folder / "checkpoint-3")
        trainer = _trainer(folder, callbacks=[EarlyStoppingCallback(early_stopping_patience=4)], **changes)
        trainer.train(resume_from_checkpoint="auto" if way == "resumed" else None)
        ended[way] = trainer.state.global_step
    assert ended["whole"] == ended["resumed"] < 12


def test_unknown_form_is_refused_by_its_number(tmp_path: Path) -> None:
    _trainer(tmp_path).train()
    folder = tmp_path / "checkpoint-6"
    sealed = json.loads((folder / "MANIFEST.json").read_text())
    del sealed["checksum"]
    sealed["format_version"] = 3
    (folder / "MANIFEST.json").write_text(json.dumps(sealed | {"checksum": digest_of(sealed)}))
    with pytest.raises(whet.WhetError, match="its format_version is 3"):
        _trainer(tmp_path).train(resume_from_checkpoint=str(folder))
