"""No setting without effect: each field of TrainingArguments changes what a tiny run does, or is refused here.

A field that is not in the tables fails the test: say there what a user sees of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from field_runs import Case, outcome
from tiny_runs import Toy, tiny_bert, toy_rows, toy_trainer
from transformers import AutoModelForQuestionAnswering

import engine
import whet
from whet.cli.main import run
from whet.watch import progress

_GPU = torch.cuda.is_available()
_STEPS = {"save_strategy": "steps", "save_steps": 1}
_BY_SCORE = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2, "load_best_model_at_end": True,
             "metric_for_best_model": "score"}  # fmt: skip
_DIVERGES = {"learning_rate": 1e30, "max_grad_norm": 0.0, "num_train_epochs": 4}

CASES = {
    "output_dir": Case(given={"output_dir": "{folder}/elsewhere"}, base=_STEPS, sees="files"),
    "overwrite_output_dir": Case(
        given={"overwrite_output_dir": True}, base=_STEPS | {"max_steps": 1}, after=_STEPS, sees="files"
    ),
    "resume_from_checkpoint": Case(given={"resume_from_checkpoint": "auto"}, after=_STEPS, sees="events"),
    "resume_allow_changes": Case(
        given={"resume_allow_changes": ["learning_rate"]}, after=_STEPS, sees="error",
        base={"resume_from_checkpoint": "auto", "learning_rate": 2e-2, "num_train_epochs": 2},
    ),
    "seed": Case(given={"seed": 1}, sees="weights"),
    "full_determinism": Case(given={"full_determinism": True}, sees="messages"),
    "ignore_data_skip": Case(given={"ignore_data_skip": True}, sees="messages"),  # tests/train has its streams
    "save_only_model": Case(given={"save_only_model": True}, base=_STEPS, sees="files"),
    "data_seed": Case(given={"data_seed": 1}, base={"train_sampling_strategy": "random"}, sees="losses"),
    "precision": Case(given={"precision": "bf16"}, sees="losses"),
    "bf16": Case(given={"bf16": True}, base={"precision": ...}, sees="losses"),
    "fp16": Case(given={"fp16": True}, base={"precision": ..., "bf16": False}, sees="losses"),
    "per_device_train_batch_size": Case(given={"per_device_train_batch_size": 2}, sees="steps"),
    "gradient_accumulation_steps": Case(given={"gradient_accumulation_steps": 2}, sees="steps"),
    "max_tokens_per_batch": Case(given={"max_tokens_per_batch": 16}, sees="events"),
    "gradient_checkpointing": Case(given={"gradient_checkpointing": True}, sees="kept_bytes"),
    "gradient_checkpointing_kwargs": Case(
        given={"gradient_checkpointing_kwargs": {"use_reentrant": True}}, base={"gradient_checkpointing": True},
        sees="error",
    ),
    "checkpointing_policy": Case(  # tests/methods counts the bytes of the products, which are kept beside the graph
        given={"checkpointing_policy": "selective"}, base={"gradient_checkpointing": True}, sees="messages"
    ),
    "methods": Case(given={"methods": ["freeze_tables"]}, sees="weights"),
    "freeze_layers": Case(given={"freeze_layers": 1}, sees="weights"),
    "cache_frozen_trunk": Case(  # tests/train/test_frozen_trunk.py has its curves
        given={"cache_frozen_trunk": True}, base={"freeze_layers": 1}, sees="error"
    ),
    "torch_empty_cache_steps": Case(given={"torch_empty_cache_steps": 1}, sees="messages"),
    "attn_implementation": Case(given={"attn_implementation": "eager"}, sees="messages"),
    "num_train_epochs": Case(given={"num_train_epochs": 2}, sees="steps"),
    "max_steps": Case(given={"max_steps": 1}, sees="steps"),
    "min_steps": Case(given={"min_steps": 7}, sees="steps"),
    "recipe": Case(given={"recipe": "few_samples", "min_steps": 7}, sees="rates"),
    "layerwise_lr_decay": Case(given={"layerwise_lr_decay": 0.5}, sees="weights"),
    "reinit_layers": Case(given={"reinit_layers": 1}, sees="losses"),
    "weight_averaging_start": Case(given={"weight_averaging_start": 0.3}, sees="weights"),
    "span_loss": Case(given={"span_loss": "compound"}, sees="losses"),
    "auto_find_batch_size": Case(given={"auto_find_batch_size": True}, sees="messages"),
    "dataloader_num_workers": Case(given={"dataloader_num_workers": 2}, sees="threads"),
    "dataloader_prefetch_factor": Case(given={"dataloader_prefetch_factor": 2}, sees="error"),
    "dataloader_persistent_workers": Case(given={"dataloader_persistent_workers": True}, sees="error"),
    "dataloader_pin_memory": Case(given={"dataloader_pin_memory": True}, sees="messages"),
    "torch_compile": Case(given={"torch_compile": True, "torch_compile_backend": "aot_eager"}, sees="messages"),
    "torch_compile_backend": Case(given={"torch_compile_backend": "nvfuser"}, sees="error"),
    "torch_compile_mode": Case(given={"torch_compile_mode": "fastest"}, sees="error"),
    "train_sampling_strategy": Case(given={"train_sampling_strategy": "random"}, sees="losses"),
    "label_smoothing_factor": Case(given={"label_smoothing_factor": 0.1}, sees="error"),  # tests/parity has its losses
    "eval_delay": Case(given={"eval_delay": 2}, base={"eval_strategy": "steps", "eval_steps": 1}, sees="events"),
    "prediction_loss_only": Case(given={"prediction_loss_only": True}, base=_BY_SCORE, sees="error"),
    "length_column_name": Case(given={"length_column_name": "size"}, sees="messages"),  # tests/train has its lengths
    "dataloader_drop_last": Case(given={"dataloader_drop_last": True}, sees="steps"),
    "learning_rate": Case(given={"learning_rate": 1e-3}, sees="weights"),
    "lr_scheduler_type": Case(given={"lr_scheduler_type": "cosine"}, sees="rates"),
    "lr_scheduler_kwargs": Case(
        given={"lr_scheduler_kwargs": {"power": 3}}, base={"lr_scheduler_type": "polynomial"}, sees="rates"
    ),
    "warmup_steps": Case(given={"warmup_steps": 2}, sees="rates"),
    "warmup_ratio": Case(given={"warmup_ratio": 0.5}, sees="rates"),
    "last_block_tokens": Case(given={"last_block_tokens": "first"}, sees="error"),  # tests/families counts the tokens
    "padding_in_loss": Case(given={"padding_in_loss": "all"}, sees="losses"),
    "optim": Case(given={"optim": "sgd"}, sees="weights"),
    "optim_args": Case(given={"optim_args": "momentum=0.9"}, base={"optim": "sgd"}, sees="weights"),
    "optimizer_in_backward": Case(
        given={"optimizer_in_backward": True}, base={"max_grad_norm": 0.0}, sees="gradients"
    ),
    "weight_decay": Case(given={"weight_decay": 0.1}, sees="weights"),
    "adam_beta1": Case(given={"adam_beta1": 0.5}, sees="weights"),
    "adam_beta2": Case(given={"adam_beta2": 0.5}, sees="weights"),
    "adam_epsilon": Case(given={"adam_epsilon": 1e-2}, sees="weights"),
    "max_grad_norm": Case(given={"max_grad_norm": 1e-3}, base={"optim": "sgd"}, sees="weights"),
    "max_nonfinite_steps": Case(given={"max_nonfinite_steps": 2}, base=_DIVERGES, sees="error"),
    "max_loss_spike": Case(
        given={"max_loss_spike": 1.01}, base={"num_train_epochs": 5, "learning_rate": 1e-5}, sees="weights"
    ),
    "memory_limit_gb": Case(given={"memory_limit_gb": 0.001}, sees="error"),
    "offload": Case(given={"offload": "params"}, sees="error"),
    "eval_strategy": Case(given={"eval_strategy": "epoch"}, sees="events"),
    "eval_steps": Case(given={"eval_steps": 2}, base={"eval_strategy": "steps"}, sees="events"),
    "eval_on_start": Case(given={"eval_on_start": True}, sees="events"),
    "per_device_eval_batch_size": Case(
        given={"per_device_eval_batch_size": 1}, base={"eval_strategy": "epoch"}, sees="eval_batches"
    ),
    "save_strategy": Case(given={"save_strategy": "epoch"}, sees="files"),
    "save_steps": Case(given={"save_steps": 1}, base={"save_strategy": "steps"}, sees="files"),
    "save_interval_s": Case(given={"save_interval_s": 1e-6}, base={"save_strategy": "time"}, sees="files"),
    "save_async": Case(given={"save_async": True}, base=_STEPS, sees="threads"),
    "save_error_policy": Case(
        given={"save_error_policy": "continue"}, base=_STEPS, sees="error", bad_disk=True
    ),
    "save_total_limit": Case(given={"save_total_limit": 1}, base=_STEPS, sees="files"),
    "enable_jit_checkpoint": Case(given={"enable_jit_checkpoint": True}, signal=True, sees="files"),
    "load_best_model_at_end": Case(
        given={"load_best_model_at_end": True}, sees="weights",
        base=_BY_SCORE | {"greater_is_better": False, "load_best_model_at_end": False},
    ),
    "metric_for_best_model": Case(
        given={"metric_for_best_model": "score"}, base=_BY_SCORE | {"metric_for_best_model": "samples_per_none"},
        sees="error",
    ),
    "greater_is_better": Case(given={"greater_is_better": False}, base=_BY_SCORE, sees="best"),
    "logging_strategy": Case(given={"logging_strategy": "no"}, sees="losses"),
    "logging_steps": Case(given={"logging_steps": 2}, sees="losses"),
    "logging_first_step": Case(given={"logging_first_step": True}, base={"logging_steps": 3}, sees="losses"),
    "log_level": Case(given={"log_level": "error"}, sees="messages"),
}  # fmt: skip
"""Field -> two settings between which a run differs, and in what a user sees it."""

_NEEDS_GPU = {"tf32": {"tf32": True}, "activation_offload": {"activation_offload": True}}
"""Field -> the setting that is refused where there is no GPU."""
_NEEDS_TENSORBOARD = {
    "report_to": Case(given={"report_to": "tensorboard"}, sees="files"),
    "logging_dir": Case(given={"logging_dir": "{folder}/logs"}, base={"report_to": "tensorboard"}, sees="files"),
}
_BY_COMMAND = {
    "do_train": ("--do_train", "train_results.json"),
    "do_eval": ("--do_eval", "eval_results.json"),
    "do_predict": ("--do_predict", "predict_results.json"),
}
"""Fields that `whet qa` reads: the flag, and the file that comes of it and of no other."""
_NEEDS_RANKS = {"ddp_backend", "ddp_timeout", "ddp_comm_hook", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
                "zero_stage", "fsdp",
                "deepspeed"}  # fmt: skip
"""Fields that count with several ranks: tests/ranks."""
_SHOWN_APART = {"use_cpu", "run_name", "disable_tqdm", "profile", "remove_unused_columns", "label_names",
                "log_format", "include_for_metrics", "eval_do_concat_batches", "cuda_graphs",
                "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
                "hub_revision"}  # fmt: skip
"""Fields with a test of their own: below, those of metrics in tests/train/test_trainer_metrics_inputs.py, graphs in
tests/models/test_captured.py, uploads in tests/classify/test_classify_card.py."""


def test_every_field_is_shown_to_count() -> None:
    fields = {field.name for field in dataclasses.fields(engine.TrainingArguments)}
    assert fields == {*CASES, *_NEEDS_GPU, *_NEEDS_TENSORBOARD, *_BY_COMMAND, *_NEEDS_RANKS, *_SHOWN_APART}


@pytest.mark.parametrize("name", CASES)
def test_the_setting_changes_the_run(name: str, tmp_path: Path) -> None:
    _differs(CASES[name], tmp_path)


@pytest.mark.parametrize("name", _NEEDS_TENSORBOARD)
def test_the_setting_changes_what_trackers_write(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    _differs(_NEEDS_TENSORBOARD[name], tmp_path)


def _differs(case: Case, folder: Path) -> None:
    """The two runs differ in what the case says; one of them, at least, comes to its end."""
    plain, changed = _plain(case, folder / "plain"), outcome(folder / "changed", case, changed=True)
    assert {plain["error"], changed["error"]} & {None} or case.sees == "error", plain["error"]
    assert plain[case.sees] != changed[case.sees], f"{dict(case.given)} leaves {case.sees} as it is"


_PLAIN: dict[str, dict[str, Any]] = {}


def _plain(case: Case, folder: Path) -> dict[str, Any]:
    """The run without the setting; cases that begin from the same one share it."""
    key = str(dataclasses.replace(case, given={}, sees=""))
    if key not in _PLAIN:
        _PLAIN[key] = outcome(folder, case, changed=False)
    return _PLAIN[key]


def test_equal_settings_give_equal_runs(tmp_path: Path) -> None:
    """What the cases see does not differ by itself."""
    case = Case(given={}, base=_STEPS | {"eval_strategy": "epoch"}, sees="")
    once, first, second = (outcome(tmp_path / name, case, changed=False) for name in "abc")
    assert once["error"] is None  # a process's first run logs some things that are done once for all its runs
    assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.skipif(_GPU, reason="shows what is refused where there is no GPU")
@pytest.mark.parametrize("name", _NEEDS_GPU)
def test_what_needs_a_gpu_is_refused_without_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="GPU") as caught:
        engine.Trainer(model=tiny_bert(), args=engine.TrainingArguments(output_dir=tmp_path, **_NEEDS_GPU[name]))
    assert name in str(caught.value).lower()


def test_use_cpu(tmp_path: Path) -> None:
    """Where there is a GPU, the run stays off it; where there is none, it is on the CPU either way."""
    devices = [
        engine.Trainer(
            model=tiny_bert(), args=engine.TrainingArguments(output_dir=tmp_path, use_cpu=wanted)
        ).device.type
        for wanted in (False, True)
    ]
    assert devices == ["cuda" if _GPU else "cpu", "cpu"]


@pytest.mark.parametrize("name", _BY_COMMAND)
def test_what_the_command_is_to_do(name: str, tmp_path: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    AutoModelForQuestionAnswering.from_pretrained("bert-base-uncased").save_pretrained("bert-base-uncased")
    flag, file = _BY_COMMAND[name]
    words = ["qa", "--model_name_or_path", "bert-base-uncased", "--train_file", "train.json", "--validation_file",
             "dev.json", "--test_file", "test.json", "--use_cpu", "--num_train_epochs", "1", flag]  # fmt: skip
    assert run([*words, "--output_dir", "out", "--precision", "fp32"]) == 0
    results = {path.name for path in Path("out").glob("*_results.json")}
    assert results == {file, "all_results.json"}


def test_run_name_reaches_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker is one that only keeps how it was started: the real ones talk to a network."""
    started: list[dict[str, Any]] = []
    module = SimpleNamespace(init=lambda **how: started.append(how), log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", module)
    for name in ("first", "second"):
        case = Case(given={}, base={"report_to": "trackio", "run_name": name, "max_steps": 1}, sees="steps")
        assert outcome(tmp_path / name, case, changed=False)["error"] is None
    assert [how["name"] for how in started] == ["first", "second"]


@pytest.mark.parametrize("trackers", ["none", "tensorboard"])
def test_run_name_without_a_tracker_that_has_names_is_refused(trackers: str) -> None:
    with pytest.raises(whet.ConfigError, match="run_name is given, but"):
        engine.TrainingArguments(run_name="first", report_to=trackers)


def test_disable_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a bar, without it the lines that a file gets."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = [
        {type(one) for one in engine.Trainer(tiny_bert(), engine.TrainingArguments(disable_tqdm=off)).events.callbacks}
        for off in (False, True)
    ]
    assert progress.Bar in shown[0] - shown[1]
    assert progress.Lines in shown[1] - shown[0]


def test_log_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines for people, or JSON that a program reads."""
    kinds = []
    for form in ("text", "json"):
        toy_trainer(tmp_path, max_steps=2, logging_steps=1, log_format=form).train()
        shown = capsys.readouterr().out.splitlines()
        kinds.append([line.startswith("{") for line in shown])
    assert not any(kinds[0])
    assert all(kinds[1])


@pytest.mark.parametrize("removed", [True, False])
def test_remove_unused_columns(removed: bool, tmp_path: Path) -> None:
    """A collator sees the columns that the model does not read only if they stay in."""
    seen: list[set[str]] = []

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        seen.extend(set(row) for row in rows)
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}

    rows = [row | {"text": "words"} for row in toy_rows()]
    toy_trainer(tmp_path, train_dataset=rows, data_collator=collate, remove_unused_columns=removed).train()
    assert {frozenset(names) for names in seen} == {frozenset(("x", "labels") if removed else ("x", "labels", "text"))}


class _Aimed(Toy):
    """A toy whose labels have a name that does not say so."""

    def forward(self, x: torch.Tensor, aim: torch.Tensor | None = None) -> Any:
        return super().forward(x, labels=aim)


@pytest.mark.parametrize(("names", "judged"), [(None, False), (["aim"], True)])
def test_label_names(names: list[str] | None, judged: bool, tmp_path: Path) -> None:
    """Metrics are computed where the labels are known."""
    rows = [{"x": row["x"], "aim": row["labels"]} for row in toy_rows()]
    trainer = toy_trainer(
        tmp_path, model=_Aimed(), train_dataset=rows, eval_dataset=rows, compute_metrics=lambda _: {"score": 1.0},
        label_names=names,
    )  # fmt: skip
    assert ("eval_score" in trainer.evaluate()) is judged


def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for wanted in (False, True):
        case = Case(given={}, base={"profile": wanted}, sees="steps")
        assert outcome(tmp_path / str(wanted), case, changed=False)["error"] is None
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        printed.append([json.loads(line) for line in lines])
    assert [any("profile" in line for line in lines) for lines in printed] == [False, True]


def test_tensorboard_is_there_or_refused(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard"):
        pytest.skip("tensorboard is installed")
    with pytest.raises(whet.ConfigError, match="tensorboard"):
        engine.Trainer(tiny_bert(), engine.TrainingArguments(output_dir=tmp_path, report_to="tensorboard"))
