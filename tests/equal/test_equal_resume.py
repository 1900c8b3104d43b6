"""A run that was stopped and resumed ends, bit for bit, where it would have ended uninterrupted; dropout is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import IBertConfig, IBertForQuestionAnswering, TrainerCallback

import engine
from tiny import arguments, assert_same_weights, losses, padded, plain_torch, tiny_model, tiny_rows, weights_of

FAMILIES = ("albert", "bert", "distilbert", "roberta")
N_STEPS = 14
STEPS_PER_EPOCH = 7


class StopAfter(TrainerCallback):
    """Ends training after one step and asks for a checkpoint of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


@dataclass
class Ended:
    """Where a run stands when `train` returns."""

    history: list[dict[str, float]]
    """The entries of the log that belong to steps."""
    mean_loss: float
    weights: dict[str, Tensor]


def ended(trainer: engine.Trainer, resume: str | bool | None = None) -> Ended:
    """Train and return what there is to compare."""
    mean_loss = trainer.train(resume_from_checkpoint=resume).training_loss
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Ended(history, mean_loss, weights_of(trainer.model))


def trainer_of(folder: Path, family: str = "bert", *, stop: int = 0, seed: int = 0, **changes: Any) -> engine.Trainer:
    """Return a trainer over 75 rows, 12 a step; `seed` is that of the first weights alone."""
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": N_STEPS}
    return engine.Trainer(
        model=tiny_model(family, dropout=0.1, seed=seed),
        args=arguments(folder, **(usual | {"weight_decay": 0.01} | changes)),
        train_dataset=tiny_rows(75, family),
        callbacks=[StopAfter(stop)],
    )


def assert_identical(found: Ended, wanted: Ended) -> None:
    """Every logged number of every step, the mean loss and every bit of every weight are equal."""
    assert [entry["step"] for entry in found.history] == list(range(1, N_STEPS + 1))
    assert found.history == wanted.history
    assert found.mean_loss == wanted.mean_loss
    assert [name for name in wanted.weights if not torch.equal(found.weights[name], wanted.weights[name])] == []


class Uninterrupted(dict[str, Ended]):
    """The run of each family that a test asks for, which nobody stopped."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, family: str) -> Ended:
        self[family] = ended(trainer_of(self._make_folder(family), family))
        return self[family]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """The runs that the others are compared with."""
    return Uninterrupted(tmp_path_factory.mktemp)


@pytest.mark.each_value
@pytest.mark.parametrize("stop", [1, 5, STEPS_PER_EPOCH, N_STEPS - 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_is_uninterrupted(tmp_path: Path, uninterrupted: dict[str, Ended], family: str, stop: int) -> None:
    """Stopped early, within an epoch, between two, before the last step; whoever resumes begins with other weights."""
    assert len(ended(trainer_of(tmp_path, family, stop=stop)).history) == stop
    assert_identical(ended(trainer_of(tmp_path, family, seed=9), "auto"), uninterrupted[family])


def test_resumed_on_plain_torch_is_uninterrupted(tmp_path: Path) -> None:
    with plain_torch():
        whole = ended(trainer_of(tmp_path / "whole"))
        ended(trainer_of(tmp_path / "cut", stop=5))
        assert_identical(ended(trainer_of(tmp_path / "cut", seed=9), "auto"), whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "adamw_torch"},
        {"lr_scheduler_type": "cosine"},
        pytest.param({"lr_scheduler_type": "polynomial"}, marks=pytest.mark.night),
        pytest.param({"lr_scheduler_type": "inverse_sqrt"}, marks=pytest.mark.night),
        pytest.param({"lr_scheduler_type": "constant_with_warmup"}, marks=pytest.mark.night),
        {"dataloader_drop_last": True},
    ],
    ids=lambda changes: "-".join(f"{name}-{value}" for name, value in changes.items()),
)
def test_resumed_is_uninterrupted_with_other_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = ended(trainer_of(tmp_path / "whole", **changes))
    ended(trainer_of(tmp_path / "cut", stop=8, **changes))
    assert_identical(ended(trainer_of(tmp_path / "cut", seed=9, **changes), "auto"), whole)


def test_every_way_to_name_the_checkpoint(tmp_path: Path, uninterrupted: dict[str, Ended]) -> None:
    ended(trainer_of(tmp_path / "cut", stop=5))
    path = str(tmp_path / "cut" / "checkpoint-5")
    for resume in (True, "auto", path):
        assert_identical(ended(trainer_of(tmp_path / "cut", seed=9), resume), uninterrupted["bert"])
    asked = trainer_of(tmp_path / "elsewhere", seed=9, resume_from_checkpoint=path)
    assert_identical(ended(asked), uninterrupted["bert"])


def test_stopped_twice(tmp_path: Path, uninterrupted: dict[str, Ended]) -> None:
    ended(trainer_of(tmp_path, stop=3))
    ended(trainer_of(tmp_path, seed=8, stop=9), "auto")
    assert_identical(ended(trainer_of(tmp_path, seed=9), "auto"), uninterrupted["bert"])


def test_resumed_with_other_batches_is_uninterrupted_to_rounding(
    tmp_path: Path, uninterrupted: dict[str, Ended]
) -> None:
    """A run may move to a machine with less memory: 12 rows are a step there too. Tolerances as for whole runs."""
    ended(trainer_of(tmp_path, stop=5))
    trainer = trainer_of(tmp_path, seed=9, per_device_train_batch_size=2, gradient_accumulation_steps=6)
    found, wanted = ended(trainer, "auto"), uninterrupted["bert"]
    assert losses(trainer) == pytest.approx([entry["loss"] for entry in wanted.history], rel=1e-6)
    assert_same_weights(found.weights, wanted.weights, 1e-6)


def _padded_trainer(folder: Path, *, stop: int = 0, seed: int = 0) -> engine.Trainer:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = IBertForQuestionAnswering(IBertConfig(vocab_size=200, max_position_embeddings=80, **sizes))
    args = arguments(folder, per_device_train_batch_size=6, gradient_accumulation_steps=2, max_steps=N_STEPS)
    columns = padded(list(tiny_rows(75, "roberta")), pad_id=1)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(75)]
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, callbacks=[StopAfter(stop)])
    assert not trainer.objective.packed
    return trainer


def test_resumed_is_uninterrupted_where_batches_are_padded(tmp_path: Path) -> None:
    """I-BERT runs padded with torch's own dropout, whose generator is set from the place in the run."""
    whole = ended(_padded_trainer(tmp_path / "whole"))
    ended(_padded_trainer(tmp_path / "cut", stop=5))
    torch.rand(1000)  # whatever else draws numbers in the new process
    assert_identical(ended(_padded_trainer(tmp_path / "cut", seed=9), "auto"), whole)
