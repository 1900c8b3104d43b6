"""A run that was stopped and resumed ends with the very bits of one that was not, dropout and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Toy, arguments, assert_same_weights, masked_rows, span_rows, tiny_bert, toy_rows
from torch import nn
from transformers import (
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForQuestionAnswering,
    TrainerCallback,
    default_data_collator,
)

import engine
from whet.errors import ConfigError


def _unknown_family() -> nn.Module:
    """A question answering model that whet runs padded."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    return DebertaV2ForQuestionAnswering(config)


def _one_length() -> list[dict[str, Any]]:
    return [
        {"input_ids": ids["input_ids"].tolist(), "attention_mask": [1] * 10, "start_positions": 1, "end_positions": 3}
        for ids in masked_rows()
    ]


@dataclass(frozen=True)
class Case:
    """Something to train, and how."""

    model: Callable[[], nn.Module] = lambda: Toy(dropout=0.3)
    rows: Callable[[], list[dict[str, Any]]] = toy_rows
    changes: dict[str, Any] = field(default_factory=dict)
    optimizers: Callable[[nn.Module], tuple[Any, Any]] = lambda _: (None, None)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _sgd_in_stairs(model: nn.Module) -> tuple[Any, Any]:
    optimizer = _sgd(model)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _sgd_in_one_cycle(model: nn.Module) -> tuple[Any, Any]:
    optimizer = _sgd(model)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)


def _sgd_at_milestones(model: nn.Module) -> tuple[Any, Any]:
    optimizer = _sgd(model)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 6], gamma=0.5)


CASES = {
    "plain module": Case(),
    "packed spans": Case(model=tiny_bert, rows=span_rows),
    "padded spans": Case(model=_unknown_family, rows=_one_length),
    "tied weights": Case(model=lambda: tiny_bert(BertForMaskedLM), rows=masked_rows),
    "in the middle of an epoch": Case(changes={"per_device_train_batch_size": 2}),
    "accumulated": Case(changes={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    "unfused optimizer": Case(changes={"optim": "adamw_torch"}),
    "cosine with warm-up": Case(changes={"lr_scheduler_type": "cosine", "warmup_steps": 5}),
    "by a metric": Case(
        changes={
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "steps",
            "eval_steps": 1,
            "lr_scheduler_kwargs": {"factor": 0.5, "patience": 1, "threshold": 0.5},
        }
    ),
    "greedy": Case(
        changes={
            "lr_scheduler_type": "greedy",
            "eval_strategy": "steps",
            "eval_steps": 1,
            "lr_scheduler_kwargs": {"factor": 0.5, "patience": 1, "threshold": 0.5, "smooth": True, "max_lr": 0.1},
        }
    ),
    "by a metric, not judged yet": Case(
        changes={"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 5}
    ),
    "bf16": Case(model=tiny_bert, rows=span_rows, changes={"bf16": True}),
    "fp16": Case(model=tiny_bert, rows=span_rows, changes={"fp16": True}),
    "evaluated": Case(
        model=tiny_bert,
        rows=span_rows,
        changes={"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
    ),
    "own optimizer": Case(optimizers=lambda model: (_sgd(model), None)),
    "own schedule": Case(optimizers=_sgd_in_stairs),
    "own schedule with milestones": Case(optimizers=_sgd_at_milestones),
    "saved between two logs": Case(changes={"logging_steps": 3}),
    "own cyclic schedule": Case(optimizers=_sgd_in_one_cycle),
}
_RUN = {
    "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "train_sampling_strategy": "random",
    "save_total_limit": None,
}  # fmt: skip


def _trainer(case: Case, folder: Path, **changes: Any) -> engine.Trainer:
    model = case.model()
    return engine.Trainer(
        model=model,
        args=arguments(folder, **(_RUN | case.changes | changes)),
        data_collator=default_data_collator if isinstance(model, BertForMaskedLM) else None,
        train_dataset=case.rows(),
        eval_dataset=case.rows()[:5],
        optimizers=case.optimizers(model),
    )


def _figures(trainer: engine.Trainer) -> list[dict[str, Any]]:
    """The log without times."""
    timed = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history]


def _optimizer_bits(trainer: engine.Trainer) -> dict[str, Any]:
    assert trainer.optimizer is not None
    state = trainer.optimizer.state_dict()["state"]
    return {
        f"{p}.{name}": v for p, values in state.items() for name, v in values.items() if isinstance(v, torch.Tensor)
    }


@pytest.mark.each_value
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("how", ["auto", "path"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str, how: str) -> None:
    case = CASES[name]
    whole = _trainer(case, tmp_path / "whole")
    whole.train()
    folder = tmp_path / "resumed"
    folder.mkdir()
    (tmp_path / "whole" / "checkpoint-4").rename(folder / "checkpoint-4")
    resumed = _trainer(case, folder, resume_from_checkpoint="auto" if how == "auto" else str(folder / "checkpoint-4"))
    resumed.train()
    assert_same_weights(resumed.model, whole.model)
    assert_same_weights(_optimizer_bits(resumed), _optimizer_bits(whole))
    assert _figures(resumed) == _figures(whole)
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (
        whole.state.best_metric,
        whole.state.best_global_step,
    )


def test_dropout_is_at_work_in_these_runs(tmp_path: Path) -> None:
    """Another seed moves the masks alone (rows in order), and with them the weights."""
    for name in ("plain module", "packed spans", "padded spans", "tied weights"):
        runs = [
            _trainer(
                CASES[name], tmp_path / f"{seed}", seed=seed, train_sampling_strategy="sequential", save_strategy="no"
            )
            for seed in (1, 2)
        ]
        for run in runs:
            run.train()
        first, second = (torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in runs)
        assert not torch.equal(first, second), name


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    case = CASES["plain module"]
    whole = _trainer(case, tmp_path)
    whole.train()
    again = _trainer(case, tmp_path, resume_from_checkpoint="auto")
    result = again.train()
    assert result.global_step == 8
    assert result.training_loss == whole.state.log_history[-1]["train_loss"]
    assert_same_weights(again.model, whole.model)


def test_a_run_resumed_for_longer_goes_on(tmp_path: Path) -> None:
    case = CASES["plain module"]
    _trainer(case, tmp_path).train()
    longer = _trainer(case, tmp_path, max_steps=11, resume_from_checkpoint="auto")
    assert longer.train().global_step == 11
    assert [entry["step"] for entry in longer.state.log_history if "loss" in entry] == list(range(1, 12))


@pytest.mark.parametrize(
    "changes", [{"per_device_train_batch_size": 6}, {"seed": 1}, {"gradient_accumulation_steps": 2}]
)
def test_a_run_that_would_not_go_on_as_it_began_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    """Other rows a step, or another order: step 4 of this run is another place than step 4 of that one."""
    _trainer(CASES["plain module"], tmp_path).train()
    with pytest.raises(ConfigError, match=r"(?s)checkpoint-8 cannot resume.*got: .* in the checkpoint -> .* now"):
        _trainer(CASES["plain module"], tmp_path, max_steps=12, resume_from_checkpoint="auto", **changes).train()


def test_an_epoch_that_was_left_early_stays_left(tmp_path: Path) -> None:
    """The second step of the first epoch was its last; the run goes on with the second epoch's rows."""

    class Leaves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.global_step == 2

    def trainer(**changes: Any) -> engine.Trainer:
        made = _trainer(CASES["plain module"], tmp_path, max_steps=9, **changes)
        made.events.callbacks.append(Leaves())
        return made

    whole = trainer()
    whole.train()
    assert whole.state.global_step == 8
    resumed = trainer(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed.train()
    assert_same_weights(resumed.model, whole.model)
    assert _figures(resumed) == _figures(whole)


def test_best_checkpoint_is_found_after_a_resume(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 1.0}
    case = CASES["plain module"]
    whole = _trainer(case, tmp_path, **changes)
    whole.train()
    resumed = _trainer(case, tmp_path, **changes, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed.train()
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert_same_weights(resumed.model, whole.model)
