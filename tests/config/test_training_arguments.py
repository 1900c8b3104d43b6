"""TrainingArguments: transformers' names and defaults, the guides' calls, and errors that say everything."""

import dataclasses
import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import TrainingArguments
from whet import ConfigError
from whet.config.settings import options_of

_OTHER_DEFAULTS = {
    "output_dir": "theirs is None, which they turn into this one",
    "disable_tqdm": "theirs is None, which they turn into False",
    "report_to": "theirs is the text none, which they turn into an empty list",
    "optim": "theirs depends on torch; checked apart",
    "bf16": "theirs is False, which does not tell whether it was given; as precision says",
    "fp16": "theirs is False, which does not tell whether it was given; as precision says",
    "dataloader_pin_memory": "theirs is True, which does not tell whether it was given",
    "gradient_checkpointing": "theirs is None, for its newer name activation_checkpointing, which is False",
    "ddp_timeout": "theirs is 1800: half an hour until a rank that hangs is noticed",
    "enable_jit_checkpoint": "theirs is False; ours is on for the command line, off for a library",
}
_OLDER = {"overwrite_output_dir", "warmup_ratio", "logging_dir"}
"""Fields of transformers 4 that whet keeps."""
_OWN = {
    "profile", "precision", "max_tokens_per_batch", "checkpointing_policy", "activation_offload", "attn_implementation",
    "freeze_layers", "cache_frozen_trunk", "optimizer_in_backward",
    "max_nonfinite_steps", "max_loss_spike", "memory_limit_gb", "methods",
    "resume_allow_changes", "save_interval_s", "save_async", "save_error_policy", "padding_in_loss", "log_format",
    "recipe", "min_steps", "layerwise_lr_decay", "reinit_layers", "weight_averaging_start", "span_loss",
    "last_block_tokens", "cuda_graphs", "ddp_comm_hook", "zero_stage", "offload",
}  # fmt: skip
"""Fields that transformers does not have."""


def _problems(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**given)
    return str(caught.value)


def test_names_and_defaults_are_those_of_transformers() -> None:
    theirs = {field.name: field for field in dataclasses.fields(_transformers_class())}
    ours = options_of(TrainingArguments)
    assert set(ours) - set(theirs) == _OLDER | _OWN
    same = set(ours) - _OLDER - _OWN - set(_OTHER_DEFAULTS)
    assert {name: ours[name].default for name in same} == {name: _default(theirs[name]) for name in same}


def _default(field: dataclasses.Field) -> Any:
    """Return the default; whet's arguments are frozen, so a list is a tuple there."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    made = field.default_factory()
    return tuple(made) if isinstance(made, list) else made


_LATER = [
    ({}, {"output_dir": "trainer_output", "report_to": (), "disable_tqdm": False, "optim": "auto"}),
    ({"eval_strategy": "steps", "logging_steps": 25}, {"do_eval": True, "eval_steps": 25}),
    ({"eval_strategy": "steps", "eval_steps": 50}, {"do_eval": True, "eval_steps": 50}),
    ({"eval_strategy": "epoch"}, {"do_eval": True, "eval_steps": None}),
    ({"eval_on_start": True}, {"do_eval": True}),
    (
        {"eval_strategy": "steps", "load_best_model_at_end": True},
        {"metric_for_best_model": "loss", "greater_is_better": False},
    ),
    ({"metric_for_best_model": "f1"}, {"greater_is_better": True}),
    ({"metric_for_best_model": "eval_loss"}, {"greater_is_better": False}),
    ({"metric_for_best_model": "f1", "greater_is_better": False}, {"greater_is_better": False}),
]
"""What transformers' __post_init__ makes of these; its class can be built only where accelerate is installed."""


@pytest.mark.parametrize(("given", "later"), _LATER, ids=str)
def test_defaults_that_follow_from_other_fields_are_filled_in(
    given: dict[str, object], later: dict[str, object]
) -> None:
    args = TrainingArguments(**given)
    assert {name: getattr(args, name) for name in later} == later


def test_calls_of_the_guides_construct_arguments() -> None:
    assert TrainingArguments(output_dir="./outputs", bf16=True, use_cpu=True).bf16
    assert TrainingArguments(output_dir="out", no_cuda=True).use_cpu
    default_args = {"output_dir": "tmp", "eval_strategy": "steps", "num_train_epochs": 1, "report_to": "none"}
    args = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=16, **default_args)
    assert (args.train_rows_per_step, args.report_to, args.num_train_epochs) == (64, (), 1.0)
    assert TrainingArguments(per_device_train_batch_size=256, per_device_eval_batch_size=256, **default_args).do_eval


def test_every_problem_is_reported_at_once() -> None:
    text = _problems(learning_rat=1e-5, fp16_full_eval=True, seed="abc", bf16="perhaps", eval_strategy="daily")
    assert "did you mean learning_rate?" in text
    assert "whet does not honour fp16_full_eval" in text
    assert "give seed a whole number, such as 42" in text
    assert "bf16 takes true or false" in text
    assert "eval_strategy takes one of no, steps, epoch" in text
    assert text.count("  fix: ") == 5


def test_broken_rules_are_reported_at_once() -> None:
    text = _problems(per_device_train_batch_size=0, adam_beta1=1.0, save_strategy="best")
    assert text.count("  fix: ") == 4
    assert "--per_device_train_batch_size 1 or more" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "abc"),
        ("learning_rate", float("nan")),
        ("learning_rate", None),
        ("learning_rate", 10**400),
        ("max_steps", 1.5),
        ("max_steps", True),
        ("bf16", 7),
        ("run_name", 2024),
        ("output_dir", 3),
        ("report_to", {"wandb": 1}),
        ("report_to", "wandbb"),
        ("lr_scheduler_kwargs", "[1]"),
        ("lr_scheduler_kwargs", "not json"),
        ("optim", 3),
        ("eval_steps", "often"),
    ],
)
def test_wrong_type_is_a_config_error_that_names_the_field(name: str, value: object) -> None:
    text = _problems(**{name: value})
    assert text.startswith(f"{name} does not fit")
    assert text.count("  fix: ") == 1


def test_settings_are_frozen_and_can_be_replaced_under_the_same_rules() -> None:
    args = TrainingArguments()
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 3  # type: ignore[misc]
    assert dataclasses.replace(args, seed=3).seed == 3
    with pytest.raises(ConfigError):
        dataclasses.replace(args, seed=-3)


def test_to_dict_is_json_that_restores_equal_settings() -> None:
    args = TrainingArguments(
        output_dir="out", lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}, report_to=["tensorboard"]
    )
    assert TrainingArguments(**json.loads(args.to_json_string())) == args
    assert list(args.to_dict()) == list(options_of(TrainingArguments))


def test_settings_survive_pickling_to_another_process() -> None:
    args = TrainingArguments(seed=7, report_to="tensorboard")
    assert pickle.loads(pickle.dumps(args)) == args  # what multiprocessing does


def test_paths_and_the_home_folder_are_accepted_as_folders(tmp_path: Path) -> None:
    assert TrainingArguments(output_dir=tmp_path).output_dir == str(tmp_path)
    assert TrainingArguments(output_dir="~/out").output_dir == str(Path.home() / "out")


def test_report_to_all_means_the_installed_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that a tracker left in the working directory is no installed tracker."""
    for name in ("wandb", "mlflow"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # what an earlier test imported is found without sys.path
    assert TrainingArguments(report_to="all").report_to == ()
    (tmp_path / "mlflow" / "__init__.py").touch()
    assert TrainingArguments(report_to="all").report_to == ("mlflow",)
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "true")
    assert TrainingArguments(report_to="all").report_to == (), "as in transformers"


def test_trackers_are_read_from_texts_lists_and_commas() -> None:
    assert TrainingArguments(report_to="wandb, tensorboard,wandb").report_to == ("wandb", "tensorboard")
    assert TrainingArguments(report_to=["wandb", "tensorboard"]).report_to == ("wandb", "tensorboard")
    assert TrainingArguments(report_to=["none"]).report_to == ()


def test_older_names_are_accepted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = TrainingArguments(no_cuda=True, evaluation_strategy="epoch", use_ipex=True, xpu_backend="ccl")
    assert (args.use_cpu, args.eval_strategy) == (True, "epoch")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "no_cuda is an older name of use_cpu, and was taken as true"
    assert said[1] == "evaluation_strategy is an older name of eval_strategy, and was taken as epoch"
    assert said[2].startswith("use_ipex has no effect: Intel's extension for PyTorch is archived")
    assert said[3] == "xpu_backend is an older name of ddp_backend, and was taken as gloo"


def _transformers_class() -> type:
    return pytest.importorskip("transformers").TrainingArguments
