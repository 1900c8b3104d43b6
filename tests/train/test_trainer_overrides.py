"""Methods that a subclass of the Trainer overrides are called as transformers' Trainer calls them, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from override_runs import Smoothed, class_rows, losses, ours, pad, token_rows
from tiny_runs import (
    Toy,
    assert_same_weights,
    checkpoints,
    entries,
    tiny_bert,
    toy_rows,
)
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import BertForSequenceClassification

import engine
import whet
from whet.errors import ConfigError


def test_overridden_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.n_steps = num_training_steps
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return self.lr_scheduler

    trainer = Own(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.train()
    assert trainer.n_steps == 4
    assert [rate for _, rate in entries(trainer, "learning_rate")] == [0.5, 0.25, 0.125, 0.0625]
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_create_optimizer_and_scheduler_may_be_overridden_whole(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)

    trainer = Own(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.train()
    assert {rate for _, rate in entries(trainer, "learning_rate")} == {0.25}


def test_an_optimizer_that_is_not_set_is_refused(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            pass

    with pytest.raises(ConfigError, match=r"left no optimizer.*"):
        Own(Smoothed(), ours(tmp_path), train_dataset=class_rows()).train()


def test_an_optimizer_set_from_outside_is_used(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.train()
    assert entries(trainer, "learning_rate")[0] == (1, 0.5)


def test_decay_names_and_optimizer_class_may_be_overridden(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return ["head.bias"]

        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.SGD, {"lr": 0.5}

    trainer = Own(Smoothed(), ours(tmp_path, weight_decay=0.25), train_dataset=class_rows())
    trainer.train()
    groups = {group["weight_decay"]: len(group["params"]) for group in trainer.optimizer.param_groups}
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert groups == {0.25: 1, 0.0: 1}
    assert trainer.get_optimizer_group(trainer.model.head.bias)["weight_decay"] == 0.25


def test_an_overridden_train_loader_decides_the_batches(tmp_path: Path) -> None:
    """Its order is a function of the seed: two runs see the same rows."""

    class Own(engine.Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = WeightedRandomSampler([1.0] * 6 + [5.0] * 8, num_samples=10)
            return DataLoader(self.train_dataset, batch_size=3, sampler=sampler, collate_fn=self.data_collator)

    runs = []
    for name in ("a", "b"):
        trainer = Own(Smoothed(), ours(tmp_path / name, num_train_epochs=2), train_dataset=class_rows())
        trainer.train()
        assert (trainer.state.global_step, trainer.state.epoch) == (8, 2.0)
        runs.append(losses(trainer))
    assert runs[0] == runs[1]
    assert runs[0][:4] != runs[0][4:]


def test_a_train_loader_that_wraps_whets_own(tmp_path: Path) -> None:
    """Rows come as in a plain run; the last batch is one of its own step."""
    seen: list[int] = []

    class Own(engine.Trainer):
        def get_train_dataloader(self) -> Any:
            inner = super().get_train_dataloader()
            assert isinstance(inner, DataLoader)

            class Wrapped:
                def __len__(self) -> int:
                    return len(inner)

                def __iter__(self) -> Any:
                    for batch in inner:
                        seen.append(len(batch["labels"]))
                        yield batch

            return Wrapped()

    args = {"num_train_epochs": 2, "train_sampling_strategy": "random"}
    trainer = Own(Smoothed(), ours(tmp_path / "a", **args), train_dataset=class_rows())
    plain = engine.Trainer(Smoothed(), ours(tmp_path / "b", **args), train_dataset=class_rows())
    trainer.train()
    plain.train()
    assert seen == [4, 4, 4, 2] * 2
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)


def test_an_overridden_sampler_decides_the_rows(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return [0, 1, 2, 3] * 2

    trainer = Own(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("resumed_at", [2, 4, 5])
def test_a_run_of_an_overridden_loader_and_loss_resumes_exactly(tmp_path: Path, resumed_at: int) -> None:
    """Dropout on, rows drawn by a sampler, two micro-batches a step: every weight is bitwise that of one run."""

    class Own(engine.Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = WeightedRandomSampler([1.0, 2.0] * 7, num_samples=14)
            return DataLoader(self.train_dataset, batch_size=2, sampler=sampler, collate_fn=self.data_collator)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] * (1.0 + torch.rand(()))  # as mixup draws
            return (loss, outputs) if return_outputs else loss

    def run(folder: Path, resume: Path | None = None) -> Any:
        args = ours(
            folder, num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1,
            per_device_train_batch_size=2,
        )  # fmt: skip
        trainer = Own(tiny_bert(BertForSequenceClassification, num_labels=3), args, pad, train_dataset=token_rows())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = run(tmp_path / "a")
    assert whole.state.global_step == 8
    again = run(tmp_path / "b", tmp_path / "a" / f"checkpoint-{resumed_at}")
    assert_same_weights(again.model, whole.model)
    assert losses(again) == losses(whole)


def test_a_loader_with_other_rows_after_a_resume_is_refused(tmp_path: Path) -> None:
    turns = iter(range(100))

    class Own(engine.Trainer):
        def get_train_dataloader(self) -> Any:
            rows = class_rows()
            shift = next(turns)
            return DataLoader(rows[shift:] + rows[:shift], batch_size=4, collate_fn=self.data_collator)

    args = {"save_strategy": "steps", "save_steps": 2}
    Own(Smoothed(), ours(tmp_path, **args), train_dataset=class_rows()).train()
    again = Own(Smoothed(), ours(tmp_path, **args), train_dataset=class_rows())
    with pytest.raises(whet.DataError, match="gives other rows than those"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_an_overridden_evaluation_loader_decides_what_is_judged(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            return DataLoader(rows[:3], batch_size=2, collate_fn=self.data_collator)

    rows = class_rows()
    trainer = Own(Smoothed(), ours(tmp_path), eval_dataset=rows)
    plain = engine.Trainer(Smoothed(), ours(tmp_path), eval_dataset=rows[:3])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


def test_overridden_log_gets_every_entry(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Own(engine.Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["extra"] = 1.0
            seen.append(dict(logs))
            super().log(logs, start_time)

    trainer = Own(
        Smoothed(), ours(tmp_path, eval_strategy="epoch"), train_dataset=class_rows(), eval_dataset=class_rows()
    )
    trainer.train()
    assert [entry["extra"] for entry in trainer.state.log_history] == [1.0] * 6
    assert [sorted(entry)[0] for entry in seen[4:5]] == ["eval_loss"]


def test_overridden_log_of_the_older_signature_is_called(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def log(self, logs: dict[str, float]) -> None:
            super().log(logs | {"extra": 1.0})

    trainer = Own(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.train()
    assert len(entries(trainer, "extra")) == 5


def test_an_overridden_evaluate_is_called_during_the_training(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix) | {
                "eval_own": -self.state.global_step
            }

    trainer = Own(
        Smoothed(),
        ours(tmp_path, eval_strategy="epoch", num_train_epochs=2, metric_for_best_model="own", greater_is_better=False),
        train_dataset=class_rows(), eval_dataset=class_rows(),
    )  # fmt: skip
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (-8, 8)


def test_an_overridden_save_model_writes_each_checkpoint(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            Path(output_dir or self.args.output_dir, "own.txt").write_text(f"{_internal_call}")

    args = ours(tmp_path, save_strategy="epoch", num_train_epochs=2)
    trainer = Own(Smoothed(), args, train_dataset=class_rows())
    trainer.train()
    trainer.save_model()
    assert [(tmp_path / name / "own.txt").read_text() for name in checkpoints(tmp_path)] == ["True", "True"]
    assert (tmp_path / "own.txt").read_text() == "False"
    again = Own(Smoothed(), args, train_dataset=class_rows())
    again.train(resume_from_checkpoint=str(tmp_path / checkpoints(tmp_path)[0]))
    assert_same_weights(again.model, trainer.model)


def test_a_save_model_without_weights_leaves_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            Path(output_dir or self.args.output_dir, "own.txt").write_text("mine")

    args = ours(tmp_path, save_strategy="epoch", num_train_epochs=2)
    trainer = Own(Smoothed(), args, train_dataset=class_rows())
    trainer.train()
    again = Own(Smoothed(), args, train_dataset=class_rows())
    again.train(resume_from_checkpoint=str(tmp_path / checkpoints(tmp_path)[0]))
    assert_same_weights(again.model, trainer.model)


@pytest.mark.parametrize("name", ["_inner_training_loop", "_save_checkpoint", "_wrap_model", "get_batch_samples"])
def test_what_the_loop_does_not_call_is_refused_at_construction(tmp_path: Path, name: str) -> None:
    kind = type("Own", (engine.Trainer,), {name: lambda self, *_, **__: None})
    with pytest.raises(ConfigError, match=rf"(?s)Own overrides.*got: {name}.*fix: .*whet\.optimize\(model\)"):
        kind(Smoothed(), ours(tmp_path), train_dataset=class_rows())


def test_what_is_patched_in_later_is_refused_before_the_training(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer._save_checkpoint = lambda *_: None
    with pytest.raises(ConfigError, match="_save_checkpoint"):
        trainer.train()


def test_a_subclass_of_both_trainers_is_refused(tmp_path: Path) -> None:
    """As trl's SFTTrainer with whet's mixed in: methods of transformers' loop would never be called."""

    class Both(engine.Trainer, transformers.Trainer):
        pass

    with pytest.raises(ConfigError, match=r"(?s)Both overrides.*_save_checkpoint|_evaluate"):
        Both(Smoothed(), ours(tmp_path), train_dataset=class_rows())


def test_new_methods_of_a_subclass_are_its_own(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.factor = factor

        def _judge(self) -> None:
            raise AssertionError

        _fuse = _n_batches = helper = _judge

    trainer = Own(Toy(), ours(tmp_path), factor=2.0, train_dataset=toy_rows(), eval_dataset=toy_rows(6))
    trainer.train()
    trainer.evaluate()
    trainer.predict(toy_rows(3))
    assert trainer.factor == 2.0


def test_a_name_of_whets_own_that_a_subclass_takes_is_refused(tmp_path: Path) -> None:
    class Own(engine.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.objective = "triplet"  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(ConfigError, match=r"self\.objective"):
        Own(Smoothed(), ours(tmp_path), train_dataset=class_rows()).train()
