"""What programs do with the settings of a run: read, copy and change them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames, ParallelMode

from engine import TrainingArguments
from whet.config.aliases import ALIASES, REFUSED
from whet.config.settings import help_texts, options_of


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
    with pytest.raises(TypeError, match="output_dir"):
        make()


@pytest.mark.parametrize("change", [lambda args: setattr(args, "seed", 3), lambda args: delattr(args, "seed")])
def test_change_of_settings_is_refused(change: Callable[[TrainingArguments], None]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="seed"):
        change(TrainingArguments())


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


"""Constants of the class that are no part of what it promises."""


def test_properties_say_what_runs_here() -> None:
    args = TrainingArguments("out", use_cpu=True)
    assert args.device == torch.device("cpu")
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert (args.world_size, args.should_save, args.should_log) == (1, True, True)
    assert TrainingArguments(warmup_steps=0.17).get_warmup_steps(20) == 4
    assert TrainingArguments(warmup_ratio=0.3).get_warmup_steps(20) == 6
    assert TrainingArguments(warmup_steps=5).get_warmup_steps(20) == 5


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="learning_rat"):
        TrainingArguments().learning_rat  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_field_of_transformers_has_a_status() -> None:
    known = {*options_of(TrainingArguments), *ALIASES, *REFUSED}
    assert {one.name for one in dataclasses.fields(transformers.TrainingArguments)} <= known
    assert len(known) == len(options_of(TrainingArguments)) + len(ALIASES) + len(REFUSED), "each name has one status"
    texts = help_texts(TrainingArguments)
    assert all(len(texts[name]) > 15 for name in options_of(TrainingArguments))
    assert all(alias.to or len(alias.note) > 15 for alias in ALIASES.values())
