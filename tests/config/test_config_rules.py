"""Every rule: what breaks it, and that its problem says everything; what lies just inside it."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine import TrainingArguments
from whet import ConfigError
from whet.config.ranks import Elsewhere, checked_for
from whet.config.rules.sharing import SHARING_RULES
from whet.config.rules.training import SAVING_RULES, TRAINING_RULES, check_output_dir, require_output_dir
from whet.config.settings import draft, options_of, spec_of
from whet.errors import OutputError, Problem
from whet.jobs.rules import JOB_RUN_RULES, best_metric_among
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.qa.arguments import ASK_RULES, DEMO_RULES, AskArguments, DemoArguments, QaArguments
from whet.tasks.qa.task import TASK
from whet.tasks.tag.arguments import TagArguments

_BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}

_TRAINING = {
    "output_dir_has_a_name": {"output_dir": " "},
    "per_device_train_batch_size_at_least_1": {"per_device_train_batch_size": 0},
    "per_device_eval_batch_size_at_least_1": {"per_device_eval_batch_size": 0},
    "gradient_accumulation_steps_at_least_1": {"gradient_accumulation_steps": 0},
    "ddp_timeout_at_least_1": {"ddp_timeout": 0},
    "ddp_bucket_cap_mb_at_least_1": {"ddp_bucket_cap_mb": 0},
    "learning_rate_at_least_0": {"learning_rate": -1e-9},
    "weight_decay_at_least_0": {"weight_decay": -0.1},
    "adam_beta1_within": {"adam_beta1": 1.0},
    "adam_beta2_within": {"adam_beta2": -0.1},
    "adam_epsilon_at_least_0": {"adam_epsilon": -1e-8},
    "max_grad_norm_at_least_0": {"max_grad_norm": -1.0},
    "max_steps_off_or_positive": {"max_steps": 0},
    "some_epochs": {"num_train_epochs": 0.0},
    "warmup_steps_at_least_0": {"warmup_steps": -1},
    "warmup_steps_whole_or_share": {"warmup_steps": 1.5},
    "warmup_ratio_within": {"warmup_ratio": 1.1},
    "one_warmup": {"warmup_ratio": 0.1, "warmup_steps": 5},
    "eval_delay_at_least_0": {"eval_delay": -1},
    "label_smoothing_factor_within": {"label_smoothing_factor": 1.5},
    "has_no_warmup": {"lr_scheduler_type": "constant", "warmup_steps": 5},
    "knows_its_kwargs": {"lr_scheduler_kwargs": {"power": 2.0}},
    "kwargs_are_values": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "2"}},
    "has_one_floor": {"lr_scheduler_type": "cosine_with_min_lr"},
    "has_a_decay": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_stable_steps": 3}},
    "is_evaluated": {"lr_scheduler_type": "reduce_lr_on_plateau"},
    "polynomial_falls": {"lr_scheduler_type": "polynomial", "learning_rate": 1e-7},
    "seed_is_a_seed": {"seed": 2**32},
    "data_seed_is_a_seed": {"data_seed": -1},
    "logging_steps_whole_or_share": {"logging_steps": 0},
    "eval_steps_whole_or_share": {"eval_strategy": "steps", "eval_steps": 2.5},
    "save_steps_whole_or_share": {"save_steps": -5},
    "save_total_limit_at_least_1": {"save_total_limit": 0},
    "best_model_is_evaluated": {"load_best_model_at_end": True},
    "best_model_is_saved": {**_BEST, "save_strategy": "epoch"},
    "saves_are_evaluated": {**_BEST, "save_steps": 500, "eval_steps": 300},
    "best_needs_a_metric": {"save_strategy": "best", "eval_strategy": "steps"},
    "trackers_or_none": {"report_to": ("none", "wandb")},
    "logging_dir_is_read": {"logging_dir": "logs"},
    "max_nonfinite_steps_at_least_1": {"max_nonfinite_steps": 0},
    "spike_is_above_the_median": {"max_loss_spike": 1.0},
    "memory_limit_gb_at_least_0": {"memory_limit_gb": -0.5},
    "interval_is_a_time": {"save_strategy": "time", "save_interval_s": 0.0},
    "allowed_changes_are_known": {"resume_allow_changes": ("output_dir",)},
    "some_saves_to_delay": {"save_async": True, "save_strategy": "no"},
    "settings_of_an_upload": {"hub_model_id": "me/mine"},
    "some_model_to_upload": {"push_to_hub": True},
}
_GOOD_QA = {"model_name_or_path": "m", "dataset_name": "squad"}
_QA = {
    "names_a_model": {"model_name_or_path": " "},
    "runs_no_foreign_code": {"trust_remote_code": True},
    "has_data": {"dataset_name": None},
    "data_from_one_place": {"train_file": "t.json"},
    "config_of_a_dataset": {"dataset_name": None, "dataset_config_name": "c", "train_file": "t.json"},
    "splits_are_of_a_dataset": {"dataset_name": None, "train_file": "t.json", "train_split_name": "dev"},
    "max_train_samples_at_least_1": {"max_train_samples": 0},
    "max_eval_samples_at_least_1": {"max_eval_samples": 0},
    "max_predict_samples_at_least_1": {"max_predict_samples": 0},
    "preprocessing_num_workers_at_least_1": {"preprocessing_num_workers": 0},
    "seeds_at_least_1": {"seeds": 0},
    "lora_r_at_least_1": {"lora_r": 0},
    "lora_alpha_at_least_1": {"lora_r": 8, "lora_alpha": 0},
    "lora_dropout_within": {"lora_r": 8, "lora_dropout": 1.0},
    "lora_is_on": {"use_dora": True},
    "one_number_of_bits": {"lora_r": 8, "load_in_8bit": True, "load_in_4bit": True},
    "rounded_weights_are_frozen": {"load_in_8bit": True},
    "rounded_weights_stay_as_they_are": {"lora_r": 8, "load_in_8bit": True, "use_dora": True},
    "distillation_temperature_above_0": {"teacher_model": "teacher", "distillation_temperature": 0.0},
    "distillation_alpha_within": {"teacher_model": "teacher", "distillation_alpha": 1.5},
    "teacher_is_there": {"distillation_alpha": 0.9},
    "moe_experts_at_least_2": {"moe_experts": 1},
    "moe_every_at_least_1": {"moe_experts": 8, "moe_every": 0},
    "top_k_is_1_or_2": {"moe_experts": 8, "moe_top_k": 3},
    "moe_capacity_factor_above_0": {"moe_experts": 8, "moe_capacity_factor": 0.0},
    "moe_aux_loss_coef_at_least_0": {"moe_experts": 8, "moe_aux_loss_coef": -0.1},
    "moe_z_loss_coef_at_least_0": {"moe_experts": 8, "moe_z_loss_coef": -0.1},
    "experts_are_asked_for": {"moe_top_k": 2},
    "max_seq_length_at_least_1": {"max_seq_length": 0, "doc_stride": -1},
    "doc_stride_at_least_0": {"doc_stride": -1},
    "windows_move_on": {"max_seq_length": 384, "doc_stride": 384},
    "max_answer_length_at_least_1": {"max_answer_length": 0},
    "threshold_is_read": {"null_score_diff_threshold": 0.5, "version_2_with_negative": False},
    "n_best_size_at_least_1": {"n_best_size": 0},
    "auto_budget_s_above_0": {"auto_budget_s": 0.0},
    "auto_ranks_at_least_1": {"auto_ranks": 0},
    "auto_is_on": {"auto_ranks": 2},
}
_GOOD_ASK = {"model": "m", "context": "c.txt", "question": ("Who?",)}
_ASK = {
    "ask_names_a_model": {"model": ""},
    "has_a_context": {"context": ""},
    "asks_something": {"question": (" ",)},
    "n_best_at_least_1": {"n_best": 0},
    "question_is_text": {"question": ("Wh\ud800?",)},
    **{name: broken for name, broken in _QA.items() if name in {rule.__name__ for rule in ASK_RULES}},
}
_DEMO = {
    "output_dir_has_a_name": {"output_dir": ""},
    "num_train_epochs_above_0": {"num_train_epochs": 0.0},
    "seed_is_a_seed": {"seed": -1},
}
_SHARING = {
    "ddp_backend_is_known": {"ddp_backend": "bogus"},
    "zero_stage_is_known": {"zero_stage": 4},
    "fsdp_is_known": {"fsdp": "hybrid_shard"},
    "fsdp_and_stage_agree": {"fsdp": "full_shard", "zero_stage": 2},
    "offload_has_somewhere_to_go": {"offload": "params"},
    "shared_gradients_have_one_sum": {"zero_stage": 3, "ddp_comm_hook": "bf16"},
    "deepspeed_sums_gradients_itself": {
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "ddp_bucket_cap_mb": 8,
    },
    "shared_weights_are_moved_by_torch": {"zero_stage": 2, "auto_find_batch_size": True},
    "shared_weights_have_an_optimizer_by_element": {"zero_stage": 3, "optim": "adafactor"},
    "deepspeed_is_honoured": {"precision": "fp32", "deepspeed": {"zero_optimization": {"stage": 1}, "amp": {}}},
    "deepspeed_goes_alone": {"precision": "fp16", "deepspeed": {"zero_optimization": {"stage": 1}}},
}
_FILES = {"dataset_name": None}
_RUN = {
    "does_something": ({}, {}),
    "metrics_are_the_tasks": ({}, {"do_eval": True, "eval_do_concat_batches": False}),
    "do_train_has_train_file": ({**_FILES, "test_file": "t.json"}, {"do_train": True}),
    "do_eval_has_validation_file": ({**_FILES, "train_file": "t.json"}, {"do_eval": True}),
    "do_predict_has_test_file": ({**_FILES, "train_file": "t.json"}, {"do_predict": True}),
    "best_metric_is_known": ({}, {"metric_for_best_model": "rouge"}),
    "profile_has_steps": ({}, {"do_eval": True, "profile": True}),
    "lora_trains": ({"lora_r": 8}, {"do_eval": True}),
    "rounded_weights_have_plain_products": (
        {"lora_r": 8, "load_in_8bit": True},
        {"do_train": True, "torch_compile": True},
    ),
    "new_rows_are_trained": ({"resize_token_embeddings": True}, {"do_eval": True}),
    "teacher_has_the_loss_of_labels": (
        {"teacher_model": "teacher"},
        {"do_train": True, "label_smoothing_factor": 0.1},
    ),
    "teacher_teaches": ({"teacher_model": "teacher"}, {"do_eval": True}),
    "experts_are_trained": ({"moe_experts": 8}, {"do_eval": True}),
    "experts_keep_their_blocks": ({"moe_experts": 8}, {"do_train": True, "reinit_layers": 1}),
    "experts_are_not_compiled": ({"moe_experts": 8}, {"do_train": True, "torch_compile": True}),
    "experts_see_all_tokens": (
        {"moe_experts": 8},
        {"do_train": True, "freeze_layers": 1, "cache_frozen_trunk": True},
    ),
    "dry_run_has_a_training": ({"dry_run": True}, {"do_eval": True}),
    "auto_trains": ({"auto": True}, {"do_eval": True}),
    "one_choice_of_rows": ({"auto": True}, {"do_train": True, "auto_find_batch_size": True}),
    "auto_needs_linux": ({"auto": True}, {"do_train": True}),
    "auto_starts_the_ranks": ({"auto": True}, {"do_train": True}),
    "seeds_are_compared": ({"seeds": 2}, {"do_train": True}),
    "seeds_resume_together": (
        {"seeds": 2},
        {"do_train": True, "do_eval": True, "resume_from_checkpoint": "checkpoint-5"},
    ),
}
_OF_RANKS = {"auto_starts_the_ranks"}
_OF_OTHER_SYSTEMS = {"auto_needs_linux"}
_SINGLE = [
    *((TrainingArguments, {}, rule, _TRAINING) for rule in TRAINING_RULES + SAVING_RULES),
    *((TrainingArguments, {}, rule, _SHARING) for rule in SHARING_RULES),
    *((QaArguments, _GOOD_QA, rule, _QA) for rule in spec_of(QaArguments).rules),
    *((AskArguments, _GOOD_ASK, rule, _ASK) for rule in ASK_RULES),
    *((DemoArguments, {}, rule, _DEMO) for rule in DEMO_RULES),
]
_FLAGS = {
    f"--{name}" for cls in (TrainingArguments, QaArguments, AskArguments, DemoArguments) for name in options_of(cls)
}


def _says_everything(problem: Problem | None) -> None:
    assert problem is not None
    assert problem.what
    assert problem.got is not None
    assert str(problem.got).strip()
    assert problem.why
    named = {word.strip(".,:;()") for word in problem.fix.split() if word.startswith("--")}
    assert named & _FLAGS or "--print_config" in named, problem.fix


@pytest.mark.parametrize(
    ("cls", "good", "rule", "broken"), _SINGLE, ids=[f"{cls.__name__}-{rule.__name__}" for cls, _, rule, _ in _SINGLE]
)
def test_broken_rule_has_four_parts_and_names_a_flag(
    cls: type, good: dict, rule: Any, broken: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.config.deepspeed.is_installed", lambda _: True)
    assert rule(draft(cls, good)) is None
    values = {**good, **broken[rule.__name__]}
    _says_everything(rule(draft(cls, values)))
    with pytest.raises(ConfigError):
        cls(**values)


@pytest.mark.parametrize("rule", [*JOB_RUN_RULES, best_metric_among(TASK.metrics)], ids=lambda rule: rule.__name__)
def test_broken_rule_between_task_and_training_has_four_parts(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    qa, args = _RUN[rule.__name__]
    if rule.__name__ in _OF_OTHER_SYSTEMS:
        monkeypatch.setattr("sys.platform", "win32")
    with checked_for(Elsewhere(n_ranks=2, has_deepspeed=False)) if rule.__name__ in _OF_RANKS else nullcontext():
        _says_everything(rule(draft(QaArguments, {**_GOOD_QA, **qa}), draft(TrainingArguments, args)))
    assert rule(draft(QaArguments, _GOOD_QA), draft(TrainingArguments, {"do_train": True, "do_eval": True})) is None


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0, "adam_beta1": 0},
        {"warmup_steps": 1}, {"warmup_steps": 0.5}, {"warmup_ratio": 1.0},
        {"max_steps": 1, "num_train_epochs": 0},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.0}},
        {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 100}},
        {**_BEST, "save_steps": 600, "eval_steps": 300},
        {**_BEST, "save_steps": 0.3, "eval_steps": 0.1},
        {**_BEST, "save_strategy": "best", "metric_for_best_model": "f1"},
        {"save_strategy": "no", "save_steps": 0, "logging_strategy": "no", "logging_steps": 0},
        {"logging_dir": "logs", "report_to": "tensorboard"},
        {"seed": 2**32 - 1, "save_total_limit": 1},
        {"max_nonfinite_steps": 1, "max_loss_spike": 1.5, "memory_limit_gb": 0},
    ],
    ids=str,
)  # fmt: skip
def test_values_at_the_limits_are_accepted(given: dict[str, object]) -> None:
    TrainingArguments(**given)


@pytest.mark.parametrize(("save", "evaluate"), [(0.25, 0.1), (0.5, 100), (100, 0.5), (100, 200)])
def test_checkpoints_between_evaluations_are_refused_if_the_best_is_loaded(save: float, evaluate: float) -> None:
    with pytest.raises(ConfigError, match="save_steps is not a multiple of eval_steps"):
        TrainingArguments(**_BEST, save_steps=save, eval_steps=evaluate)


@pytest.mark.parametrize(
    ("cls", "given", "what"),
    [
        (ClassifyArguments, {"window_pooling": "max"}, "window_pooling would change nothing without doc_stride"),
        (TagArguments, {"window_pooling": "max"}, "window_pooling would change nothing without doc_stride"),
        (ClassifyArguments, {"shuffle_seed": 7}, "shuffle_seed would change nothing without shuffle_train_dataset"),
        (ClassifyArguments, {"csv_delimiter": ";"}, "dataset_name does not go with csv_delimiter"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(cls: type, given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        cls(model_name_or_path="m", dataset_name="d", **given)
    assert len(caught.value.problems) == 1


def test_missing_files_are_reported() -> None:
    qa = QaArguments(
        model_name_or_path="m", train_file="t.json", validation_file="v.json", max_seq_length=128, doc_stride=0
    )
    assert TASK.problems(qa, TrainingArguments(do_train=True, eval_strategy="epoch")) == []
    (problem,) = TASK.problems(qa, TrainingArguments(do_predict=True))
    assert problem.what == "do_predict has no data"


def test_empty_or_missing_output_folder_is_accepted(tmp_path: Path) -> None:
    assert check_output_dir(tmp_path, overwrite=False) is None
    assert check_output_dir(tmp_path / "a" / "b", overwrite=False) is None
    assert not (tmp_path / "a").exists()
    assert require_output_dir(tmp_path / "a" / "b", overwrite=False).is_dir()


def test_nonempty_output_folder_needs_overwriting(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    _says_everything(check_output_dir(tmp_path, overwrite=False))
    with pytest.raises(ConfigError, match="--overwrite_output_dir"):
        require_output_dir(tmp_path, overwrite=False)
    assert require_output_dir(tmp_path, overwrite=True) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_file_at_the_output_path_is_an_output_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    _says_everything(check_output_dir(tmp_path / "file" / below, overwrite=True))
    with pytest.raises(OutputError) as caught:
        require_output_dir(tmp_path / "file" / below, overwrite=True)
    assert caught.value.exit_code == 73


def test_unwritable_output_folder_is_named(tmp_path: Path) -> None:
    """In a process of its own, for root may write anywhere and has to become somebody else."""
    tmp_path.chmod(0o500)
    code = (
        "import os, sys\nfrom whet.config.rules.training import check_output_dir\n"
        "os.geteuid() or os.setuid(65534)\nprint(check_output_dir(sys.argv[1], overwrite=False))"
    )
    for folder in (tmp_path, tmp_path / "out"):
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
        assert "why: this user may not write in" in done.stdout


def test_invalid_folder_name_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        require_output_dir(tmp_path / ("x" * 300), overwrite=False)
