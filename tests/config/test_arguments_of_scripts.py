"""What programs do with the settings of a run: read, copy and change them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames, ParallelMode

from engine import TrainingArguments
from whet import ConfigError, WhetError
from whet.config.names.status import statuses
from whet.config.options import options_of


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


def test_subclass_is_refused_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="cannot be subclassed"):

        @dataclass
        class Mine(TrainingArguments):
            mine: int = 1


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
