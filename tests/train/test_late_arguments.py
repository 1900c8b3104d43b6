"""Arguments that are put in a Trainer's after it was made: what they say happens, or they are refused by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_runs import Toy, arguments, toy_rows, toy_trainer
from transformers import TrainerCallback

import engine
from whet.errors import ConfigError
from whet.log import logger
from whet.train.compat import late_arguments

CHANGES: dict[str, Any] = {
    "use_cpu": {"use_cpu": False},
    "ddp_backend": {"ddp_backend": "gloo"},
    "ddp_timeout": {"ddp_timeout": 5},
    "ddp_comm_hook": {"ddp_comm_hook": "bf16"},
    "ddp_bucket_cap_mb": {"ddp_bucket_cap_mb": 5},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": False},
    "zero_stage": {"zero_stage": 1},
    "fsdp": {"fsdp": "full_shard"},
    "precision": {"precision": "bf16"},
    "bf16": {"bf16": True},
    "fp16": {"fp16": False},
    "tf32": {"tf32": False},
    "attn_implementation": {"attn_implementation": "eager"},
    "padding_in_loss": {"padding_in_loss": "sampled"},
    "label_names": {"label_names": ["labels"]},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "remove_unused_columns": {"remove_unused_columns": False},
    "max_tokens_per_batch": {"max_tokens_per_batch": 64},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "checkpointing_policy": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
    "activation_offload": {"activation_offload": True},
    "methods": {"methods": ("freeze_tables",)},
    "freeze_layers": {"freeze_layers": 1},
    "span_loss": {"span_loss": "compound"},
    "last_block_tokens": {"last_block_tokens": "all"},
    "torch_compile": {"torch_compile": True},
    "torch_compile_backend": {"torch_compile_backend": "aot_eager"},
    "torch_compile_mode": {"torch_compile_mode": "max-autotune"},
    "disable_tqdm": {"disable_tqdm": True},
    "log_format": {"log_format": "json"},
    "profile": {"profile": True},
    "report_to": {"report_to": ["tensorboard"]},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 2},
}
"""Field -> a change of it, with what it needs."""


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    before = logger.level
    yield
    logger.setLevel(before)


def test_every_field_that_construction_carries_out_is_refused_later_or_carried_out_again(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with _fields_read() as read:
        engine.Trainer(Toy(), args, train_dataset=toy_rows())
    again = {"log_level", "gradient_accumulation_steps", "per_device_train_batch_size", "eval_strategy"}
    assert read <= {*late_arguments.MODEL, *late_arguments.CALLBACKS, *again}
    assert {*late_arguments.MODEL, *late_arguments.CALLBACKS} == CHANGES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_comes_after_the_trainer_was_made_is_refused_by_name(tmp_path: Path, name: str) -> None:
    trainer = toy_trainer(tmp_path)
    try:
        trainer.args = dataclasses.replace(trainer.args, **CHANGES[name])
    except ConfigError:  # settings that this machine refuses in any case
        return
    for act in (trainer.train, trainer.evaluate, lambda: trainer.predict(toy_rows())):
        with pytest.raises(ConfigError, match=f"(?s){name}.*of trainer.args changed too late.*fix: make a new Trainer"):
            act()
    assert trainer.state.global_step == 0


def test_settings_that_are_read_later_are_those_of_the_new_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    class Reader(TrainerCallback):
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            seen.append(args.max_steps)

    trainer = toy_trainer(tmp_path, max_steps=3, callbacks=[Reader()])
    trainer.args = dataclasses.replace(trainer.args, max_steps=2, log_level="error")
    assert trainer.train().global_step == 2
    assert seen == [2, 2]
    assert logger.level == logging.ERROR


def test_arguments_that_change_under_a_running_training_are_refused(tmp_path: Path) -> None:
    class Changer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            trainer.args = dataclasses.replace(trainer.args, **changed)

    trainer = toy_trainer(tmp_path, max_steps=4, callbacks=[Changer()])
    changed: dict[str, Any] = {"max_grad_norm": 0.5}
    with pytest.raises(ConfigError, match=r"(?s)max_grad_norm of .*changed too late.*1.0 -> 0.5.*while it ran"):
        trainer.train()
    assert trainer.state.global_step == 1
    changed = {"per_device_eval_batch_size": 2}
    trainer.args = dataclasses.replace(trainer.args, max_grad_norm=1.0)
    assert trainer.train().global_step == 4


def test_model_init_carries_out_new_settings_of_the_model(tmp_path: Path) -> None:
    args = engine.TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", precision="fp32", use_cpu=True)
    trainer = engine.Trainer(args=args, model_init=lambda: Toy(), train_dataset=toy_rows(), eval_dataset=toy_rows())
    trainer.args = dataclasses.replace(args, precision="bf16", bf16=None)
    with pytest.raises(ConfigError, match=r"precision.* changed too late"):
        trainer.evaluate()
    trainer.train()
    assert trainer.precision.name == "bf16"
    assert trainer.evaluate()["eval_loss"] > 0


def test_arguments_of_transformers_that_are_put_in_later_are_translated(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_steps=3)
    theirs: Any = transformers.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=trainer.args.use_cpu)
    theirs.bf16 = True
    trainer.args = theirs
    with pytest.raises(ConfigError, match="changed too late"):
        trainer.train()


def test_an_evaluation_that_comes_late_needs_its_data_before_the_first_step(tmp_path: Path) -> None:
    args = engine.TrainingArguments(str(tmp_path), max_steps=3, save_strategy="no", use_cpu=True)
    trainer = engine.Trainer(Toy(), args, train_dataset=toy_rows())
    trainer.args = dataclasses.replace(args, eval_strategy="steps", eval_steps=2)
    with pytest.raises(ConfigError, match="no data set to evaluate on"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_names_for_a_tracker_whose_run_has_begun_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer = toy_trainer(tmp_path, max_steps=1, report_to=["tensorboard"])
    trainer.args = dataclasses.replace(trainer.args, logging_dir=str(tmp_path / "first"))
    trainer.train()
    assert list((tmp_path / "first").iterdir())
    trainer.args = dataclasses.replace(trainer.args, logging_dir=str(tmp_path / "second"))
    with pytest.raises(ConfigError, match=r"logging_dir of trainer\.args changed too late"):
        trainer.train()
    trainer.close()
    trainer.train()
    assert list((tmp_path / "second").iterdir())
    trainer.close()


@contextmanager
def _fields_read() -> Iterator[set[str]]:
    """Note the fields of TrainingArguments that are read within the block."""
    kind: Any = engine.TrainingArguments
    fields = {one.name for one in dataclasses.fields(kind)}
    read: set[str] = set()

    def note(self: Any, name: str) -> Any:
        if name in fields:
            read.add(name)
        return object.__getattribute__(self, name)

    kind.__getattribute__ = note
    try:
        yield read
    finally:
        del kind.__getattribute__
