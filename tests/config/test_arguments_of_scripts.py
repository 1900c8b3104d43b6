"""What scripts written for transformers do with TrainingArguments: parse, read, copy, change, hand in their own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_runs import Toy, toy_rows
from transformers import HfArgumentParser, IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames, ParallelMode

import engine
from engine import TrainingArguments
from whet import ConfigError, WhetError
from whet.config.names.status import statuses
from whet.config.names.translate import arguments_of
from whet.config.options import options_of


@dataclass
class ModelArguments:
    """A script's own fields."""

    model_name: str = "tiny"
    labels: list[str] | None = None


def _flags(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def _parsed(*words: str) -> TrainingArguments:
    found = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(list(words))  # pyright: ignore[reportArgumentType]
    assert isinstance(found[0], ModelArguments)
    return found[1]


def test_first_value_is_the_output_folder() -> None:
    assert TrainingArguments("out", seed=1) == TrainingArguments(output_dir="out", seed=1)


@pytest.mark.parametrize("name", ["output_dir", "gradient_checkpointing", "disable_tqdm", "report_to", "eval_delay"])
def test_none_means_the_default_if_transformers_accepts_it(name: str) -> None:
    assert TrainingArguments(**{name: None}) == TrainingArguments()


@pytest.mark.parametrize(
    "make",
    [lambda: TrainingArguments("out", 8), lambda: TrainingArguments("out", output_dir="else")],  # pyright: ignore[reportCallIssue]
)
def test_more_values_without_names_are_refused(make: Callable[[], TrainingArguments]) -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        make()


def test_parser_of_transformers_gives_the_defaults() -> None:
    assert _parsed("--output_dir", "out") == TrainingArguments("out")


_WORDS: dict[str, tuple[list[str], Any]] = {
    "bf16": (["--bf16"], True),
    "tf32": (["--tf32", "False"], False),
    "gradient_checkpointing": (["--gradient_checkpointing"], True),
    "gradient_checkpointing_kwargs": (
        ["--gradient_checkpointing", *_flags(gradient_checkpointing_kwargs='{"use_reentrant": false}')],
        {"use_reentrant": False},
    ),
    "eval_strategy": (_flags(eval_strategy="epoch"), "epoch"),
    "save_steps": (_flags(save_steps=0.25), 0.25),
    "logging_steps": (_flags(logging_steps=50), 50),
    "warmup_steps": (_flags(warmup_steps=10), 10),
    "lr_scheduler_kwargs": (
        _flags(lr_scheduler_kwargs='{"num_cycles": 2}', lr_scheduler_type="cosine"), {"num_cycles": 2},
    ),
    "report_to": (_flags(report_to="tensorboard"), ("tensorboard",)),
    "resume_from_checkpoint": (_flags(resume_from_checkpoint="True"), "auto"),
    "resume_allow_changes": (_flags(resume_allow_changes="seed,optim"), ("seed", "optim")),
    "max_tokens_per_batch": (_flags(max_tokens_per_batch=512), 512),
    "optim": (_flags(optim="adafactor"), "adafactor"),
}  # fmt: skip


@pytest.mark.parametrize("name", _WORDS)
def test_parser_of_transformers_reads_each_kind_of_field(name: str) -> None:
    words, wanted = _WORDS[name]
    found = getattr(_parsed("--model_name", "m", *words), name)
    assert found == wanted
    assert type(found) is type(wanted)


def test_parser_of_transformers_reads_dicts_and_json(tmp_path: Path) -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))  # pyright: ignore[reportArgumentType]
    values = {"model_name": "m", "output_dir": "out", "save_steps": 100, "report_to": ["tensorboard"]}
    wanted = TrainingArguments("out", save_steps=100, report_to="tensorboard")
    (tmp_path / "run.json").write_text(json.dumps(values), "utf-8")
    for found in (parser.parse_dict(values), parser.parse_json_file(str(tmp_path / "run.json"))):
        assert found == (ModelArguments("m"), wanted)


def test_settings_are_unchanged_by_an_argument_parser() -> None:
    """The parser writes to the fields of the class that it reads."""
    code = (
        "from whet.config.arguments import TrainingArguments as Settings; from transformers import HfArgumentParser;"
        "HfArgumentParser(Settings);"
        "a = Settings(save_steps=3, lr_scheduler_kwargs=None, bf16=None, resume_from_checkpoint=True);"
        "print(a.save_steps, a.lr_scheduler_kwargs, a.bf16, a.resume_from_checkpoint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "None", "None", "auto"]


@pytest.mark.parametrize("change", [lambda args: setattr(args, "seed", 3), lambda args: delattr(args, "seed")])
def test_change_of_settings_is_refused_and_names_replace(change: Callable[[TrainingArguments], None]) -> None:
    with pytest.raises(WhetError, match=r"dataclasses\.replace\(args, seed=") as caught:
        change(TrainingArguments())
    assert isinstance(caught.value, dataclasses.FrozenInstanceError)
    assert isinstance(caught.value, AttributeError)


def test_unknown_attribute_cannot_be_set() -> None:
    with pytest.raises(WhetError, match="variable of your own"):
        TrainingArguments().mine = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(TrainingArguments(), "mine")


@pytest.mark.parametrize("name", [name for name in dir(transformers.TrainingArguments) if name.startswith("set_")])
def test_setters_of_transformers_name_replace_with_fields_that_work(name: str) -> None:
    args = TrainingArguments()
    with pytest.raises(ConfigError, match="set_") as caught:
        getattr(args, name)(learning_rate=1e-3)
    way = caught.value.problems[0].fix.split("args = ")[1].split("; ")[0]
    assert isinstance(eval(way, {"dataclasses": dataclasses, "args": args}), TrainingArguments)


def test_copies_and_round_trips_are_equal() -> None:
    args = TrainingArguments("out", bf16=True, eval_strategy="epoch", report_to="tensorboard", warmup_steps=0.1)
    for twin in (
        copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args),
        TrainingArguments(**args.to_dict()), TrainingArguments(**json.loads(args.to_json_string())),
    ):  # fmt: skip
        assert twin == args
    assert dataclasses.replace(args, seed=9).seed == 9


_ENUMS = {
    "eval_strategy": IntervalStrategy.STEPS,
    "logging_strategy": IntervalStrategy.EPOCH,
    "save_strategy": SaveStrategy.EPOCH,
    "lr_scheduler_type": SchedulerType.COSINE,
    "optim": OptimizerNames.ADAMW_TORCH,
}


@pytest.mark.parametrize("name", _ENUMS)
def test_enums_of_transformers_are_accepted(name: str) -> None:
    found = getattr(TrainingArguments(**{name: _ENUMS[name]}), name)
    assert found == _ENUMS[name].value
    assert type(found) is str


def _public() -> list[str]:
    theirs = transformers.TrainingArguments
    fields = [one.name for one in dataclasses.fields(theirs)]
    return sorted({*fields, *(name for name, _ in inspect.getmembers(theirs) if not name.startswith("_"))})


_ONLY_THEIRS = {"default_optim", "framework", "is_torch_greater_or_equal_than_2_8"}
"""Constants of the class that are no part of what it promises."""


@pytest.mark.parametrize("name", [name for name in _public() if name not in _ONLY_THEIRS])
def test_public_attributes_of_transformers_can_be_read(name: str) -> None:
    """A refused field reads as what whet does: `if training_args.push_to_hub` goes on."""
    theirs, ours = (library.TrainingArguments("out", use_cpu=True) for library in (transformers, engine))
    found, wanted = getattr(ours, name), getattr(theirs, name)
    assert callable(found) == callable(wanted)
    if statuses().get(name) is not None and statuses()[name].outcome in ("refused", "no difference"):
        assert (found or None) in (wanted or None, None)


def test_properties_say_what_runs_here() -> None:
    args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=6, per_device_eval_batch_size=7)
    assert args.device == torch.device("cpu")
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert (args.n_gpu, args.world_size, args.process_index, args.local_process_index) == (0, 1, 0, 0)
    assert (args.train_batch_size, args.eval_batch_size, args.should_save, args.should_log) == (6, 7, True, True)
    with args.main_process_first(desc="tokenise"):
        pass
    assert TrainingArguments(log_level="error").get_process_log_level() == 40
    assert isinstance(args.get_process_log_level(), int)
    assert TrainingArguments(warmup_steps=0.17).get_warmup_steps(20) == 4
    assert TrainingArguments(warmup_ratio=0.3).get_warmup_steps(20) == 6
    assert TrainingArguments(warmup_steps=5).get_warmup_steps(20) == 5
    flat = args.to_sanitized_dict()
    assert {type(value) for value in flat.values()} <= {bool, int, float, str}
    assert flat["train_batch_size"] == 6


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="learning_rat"):
        TrainingArguments().learning_rat  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_subclass_is_refused_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="HfArgumentParser"):

        @dataclass
        class Mine(TrainingArguments):
            mine: int = 1


_GIVEN: dict[str, Any] = {
    "use_cpu": True, "learning_rate": 1e-4, "warmup_steps": 0.1, "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 1.0}, "optim": "adafactor", "bf16": True, "activation_checkpointing": True,
    "eval_strategy": IntervalStrategy.STEPS, "eval_steps": 5, "load_best_model_at_end": True, "save_steps": 10,
    "train_sampling_strategy": "group_by_length", "data_seed": 3, "dataloader_num_workers": 2, "log_level": "error",
    "report_to": ["tensorboard"], "disable_tqdm": True, "ddp_timeout": 60, "eval_accumulation_steps": 2,
}  # fmt: skip


def test_arguments_of_transformers_are_translated_field_by_field(tmp_path: Path) -> None:
    theirs = transformers.TrainingArguments(str(tmp_path), **_GIVEN)
    assert arguments_of(theirs) == TrainingArguments(str(tmp_path), **_GIVEN)


@pytest.mark.parametrize("kind", [transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments])
def test_arguments_of_transformers_train(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is at its default is translated in silence, in subclasses too; what was set later counts as well."""
    theirs = kind(str(tmp_path), use_cpu=True, max_steps=2, save_strategy="no", report_to="none")
    theirs.per_device_train_batch_size = 3
    with caplog.at_level("WARNING", logger="whet.config"):
        trainer = engine.Trainer(Toy(), theirs, train_dataset=toy_rows())
    assert not caplog.records
    assert trainer.args == TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, save_strategy="no", per_device_train_batch_size=3
    )
    assert trainer.train().global_step == 2


def test_arguments_of_transformers_that_change_after_the_trainer_was_made_are_refused(tmp_path: Path) -> None:
    """Trained with until they are, and the way that the refusal names works."""
    theirs: Any = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, save_strategy="no", report_to="none", lr_scheduler_kwargs={}
    )
    trainer = engine.Trainer(Toy(), theirs, train_dataset=toy_rows())
    assert trainer.train().global_step == 2
    theirs.max_steps = 3
    with pytest.raises(ConfigError, match="max_steps of TrainingArguments changed after") as caught:
        trainer.train()
    assert "make a new Trainer" in str(caught.value.problems[0].fix)
    assert engine.Trainer(Toy(), theirs, train_dataset=toy_rows()).train().global_step == 3


def test_arguments_of_transformers_whose_lists_change_after_the_trainer_was_made_are_refused(tmp_path: Path) -> None:
    theirs: Any = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to=["tensorboard"])
    trainer = engine.Trainer(Toy(), theirs, train_dataset=toy_rows())
    theirs.report_to.clear()
    with pytest.raises(ConfigError, match="report_to of TrainingArguments changed after"):
        trainer.train()


def test_arguments_of_transformers_that_whet_lacks_are_refused_by_name(tmp_path: Path) -> None:
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0, push_to_hub=True)
    with pytest.raises(ConfigError, match="neftune_noise_alpha") as caught:
        engine.Trainer(Toy(), theirs)  # pyright: ignore[reportArgumentType]
    assert "push_to_hub" in str(caught.value)
    generating = transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True)
    with pytest.raises(ConfigError, match="predict_with_generate"):
        engine.Trainer(Toy(), generating)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("args", [{"output_dir": "out"}, "out", ModelArguments()])
def test_objects_that_are_not_arguments_are_refused(args: Any) -> None:
    with pytest.raises(ConfigError, match="args are not TrainingArguments"):
        engine.Trainer(Toy(), args)


def test_every_field_of_transformers_has_a_status() -> None:
    found = statuses()
    assert {one.name for one in dataclasses.fields(transformers.TrainingArguments)} <= found.keys()
    assert options_of(TrainingArguments).keys() == {name for name, one in found.items() if one.outcome == "works"}
    assert all(len(one.note) > 15 for one in found.values())


def test_the_refusal_of_a_change_names_new_arguments_and_a_new_trainer(tmp_path: Path) -> None:
    args: Any = TrainingArguments(str(tmp_path))
    with pytest.raises(ConfigError, match="final") as caught:
        args.max_steps = 3
    fix = str(caught.value.problems[0].fix)
    assert fix == "make new ones: args = dataclasses.replace(args, max_steps=3), and a new Trainer with them"
