"""The rules that every task's run keeps: on its model, data and work, its adapter, its experts and its teacher.

`JobFields` has the first, and `Task` checks the others: a task adds rules of its own and repeats none of these.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from whet.config import recipes
from whet.config.arguments import TrainingArguments
from whet.config.environment import AUTO
from whet.config.ranks import elsewhere, here
from whet.config.rules.ranges import Rule, above, at_least, broken_if, excludes, is_given, is_set, only_with, within
from whet.errors import ConfigError, Problem
from whet.jobs.splits import SPLITS
from whet.system import is_linux


def has_data(job: Any) -> Problem | None:
    """No data, no run."""
    if job.dataset_name or _files(job):
        return None
    return Problem(
        what="no data is named",
        got="no dataset_name and no file",
        why="data comes from a dataset of the hub or from files",
        fix="use --dataset_name NAME, or --train_file, --validation_file and --test_file",
    )


def data_from_one_place(job: Any) -> Problem | None:
    """The guides' scripts would ignore the files."""
    if not (job.dataset_name and _files(job)):
        return None
    return Problem(
        what="data is named twice",
        got={"dataset_name": job.dataset_name, **_files(job)},
        why="data comes from one dataset or from files, and one of them would be ignored",
        fix=f"keep --dataset_name, or --{' and --'.join(_files(job))}",
    )


def config_of_a_dataset(job: Any) -> Problem | None:
    """Files have no configurations."""
    if not job.dataset_config_name or job.dataset_name:
        return None
    return Problem(
        what="dataset_config_name is given without a dataset",
        got=job.dataset_config_name,
        why="it chooses among the configurations of a dataset of the hub",
        fix="leave --dataset_config_name out"
        if _files(job)
        else "add --dataset_name, or leave --dataset_config_name out",
    )


def work_has_its_file(work: str, flag: str) -> Rule:
    """Return the rule that work which is asked for has its file, where the data comes from files."""
    askers = "--do_eval, --eval_strategy, --eval_on_start" if work == "do_eval" else f"--{work}"

    def rule(job: Any, args: TrainingArguments) -> Problem | None:
        if not getattr(args, work) or job.dataset_name or not _files(job) or getattr(job, flag):
            return None
        if work == "do_eval" and getattr(job, "validation_split_percentage", None) is not None:
            return None
        return Problem(
            what=f"{work} has no data",
            got=_files(job),
            why=f"with data from files, {work} reads {flag}, which is not given",
            fix=f"add --{flag}, or leave out what asks for it ({askers})",
        )

    rule.__name__ = f"{work}_has_{flag}"
    return rule


_NOT_WITH_EXPERTS = {
    "torch_compile": "a graph would be compiled again for each number of tokens that an expert gets",
    "cache_frozen_trunk": "the balance of experts is that of all tokens in all blocks, and frozen blocks would not run",
    "teacher_model": "it takes part in the loss of a training, next to the loss of the labels as they are",
    "loss=dpo": "it compares two completions, and the routers of experts change the loss of tokens",
}
"""Settings that go neither with new experts nor with those of a saved model, and why."""


def require_goes_with_saved_experts(job: Any, args: TrainingArguments) -> None:
    """Raise ConfigError for settings that do not go with the experts of the model that was loaded."""
    there = {word: why for word, why in _NOT_WITH_EXPERTS.items()
             if any(hasattr(one, word.partition("=")[0]) for one in (job, args))}  # fmt: skip
    problems = [
        Problem(
            what=f"{word.replace('=', ' ')} does not go with the experts of the model",
            got=f"{job.model_name_or_path}, which was saved with experts",
            why=why,
            fix=f"leave --{word.partition('=')[0]} out, or name a dense model in --model_name_or_path",
        )
        for word, why in there.items()
        if is_set(word, job, args)
    ]
    if problems:
        raise ConfigError.of(problems)


def metrics_are_the_tasks(job: Any, args: TrainingArguments) -> Problem | None:
    """A task judges all predictions itself; nobody else is called with them."""
    given = {"eval_do_concat_batches": args.eval_do_concat_batches, "include_for_metrics": args.include_for_metrics}
    changed = {name: value for name, value in given.items() if value not in (True, ())}
    if not changed:
        return None
    return Problem(
        what=f"{' and '.join(changed)} would change nothing here",
        got=changed,
        why="it says what a compute_metrics of your own gets, and this command computes its task's own metrics",
        fix=f"leave {' and '.join(f'--{name}' for name in changed)} out, or use whet.Trainer with compute_metrics",
    )


def seeds_are_compared(job: Any, args: TrainingArguments) -> Problem | None:
    """The best of several models is the one with the best evaluation."""
    if job.seeds <= 1 or (args.do_train and args.do_eval):
        return None
    missing = [f"--{work}" for work in ("do_train", "do_eval") if not getattr(args, work)]
    data = "" if job.dataset_name or job.validation_file or args.do_eval else " --validation_file FILE"
    return Problem(
        what="seeds has no evaluation to choose by" if args.do_train else "seeds has nothing to train",
        got=f"seeds={job.seeds} without {' and '.join(missing)}",
        why="each seed trains a model, and the one with the best evaluation is kept",
        fix=f"add {' '.join(missing)}{data}, or leave --seeds out",
    )


def _files(job: Any) -> dict[str, str]:
    return {one.file: path for one in SPLITS.values() if (path := getattr(job, one.file))}


def best_metric_among(known: Callable[[Any], Sequence[str]]) -> Rule:
    """Return the rule that the best model is chosen by a metric of the run's evaluations, which `known` returns."""

    def rule(job: Any, args: TrainingArguments) -> Problem | None:
        names = known(job)
        if args.metric_for_best_model is None or args.metric_for_best_model.removeprefix("eval_") in names:
            return None
        return Problem(
            what="metric_for_best_model names no metric",
            got=args.metric_for_best_model,
            why=f"an evaluation computes {', '.join(names)}",
            fix=f"use one of these in --metric_for_best_model, such as {names[0]}",
        )

    rule.__name__ = "best_metric_is_known"
    return rule


def _trains(rule_name: str, asked: str, *, why: str, fix: str) -> Rule:
    """Return the rule that a setting which takes part in a training is not given to a run without one."""
    return broken_if(
        rule_name,
        (asked, "do_train"),
        lambda job, args: is_set(asked, job) and not args.do_train,
        what=f"{asked} has nothing to train",
        why=why,
        fix=fix,
    )


windows_move_on = broken_if(
    "windows_move_on",
    ("doc_stride", "max_seq_length"),
    lambda spans: None not in (spans.doc_stride, spans.max_seq_length) and spans.doc_stride >= spans.max_seq_length,
    what="doc_stride is not below max_seq_length",
    why="windows of max_seq_length tokens share doc_stride tokens, so at least one must be new",
    fix="use a smaller --doc_stride, or a larger --max_seq_length",
)
windows_are_joined = only_with(
    "windows_are_joined",
    "doc_stride",
    ("window_pooling",),
    why="it joins the predictions of the windows of a text, and without doc_stride a text has one",
    fix="add --doc_stride 32, or leave --window_pooling out",
)
delimiter_is_a_character = broken_if(
    "delimiter_is_a_character",
    ("csv_delimiter",),
    lambda asked: asked.csv_delimiter is not None and len(asked.csv_delimiter) != 1,
    what="csv_delimiter is not one character",
    why="one character stands between two columns",
    fix="use one character, such as --csv_delimiter ';' (a tab: --csv_delimiter $'\\t')",
)
_BITS = ("load_in_8bit", "load_in_4bit")
JOB_RULES: tuple[Rule, ...] = (
    at_least("seeds", 1, "a run trains one model at least"),
    is_given(
        "names_a_model",
        "model_name_or_path",
        what="no model is named",
        why="fine-tuning starts from pretrained weights",
        fix="name a folder or a model of the hub: --model_name_or_path distilbert-base-uncased",
    ),
    broken_if(
        "runs_no_foreign_code",
        ("trust_remote_code",),
        lambda job: job.trust_remote_code,
        what="trust_remote_code is true",
        why="whet never runs code that comes with a model or a dataset: it could do anything this user may do",
        fix="leave --trust_remote_code out, and use a model that transformers itself implements",
    ),
    has_data,
    data_from_one_place,
    config_of_a_dataset,
    only_with(
        "splits_are_of_a_dataset",
        "dataset_name",
        [one.of_dataset for one in SPLITS.values()],
        why="they name the splits of a dataset of the hub, and files have none",
        fix="add --dataset_name, or leave them out",
    ),
    at_least("max_train_samples", 1, "training on no row is no training"),
    at_least("max_eval_samples", 1, "an evaluation of no row has no result"),
    at_least("max_predict_samples", 1, "predicting for no row gives nothing"),
    at_least("preprocessing_num_workers", 1, "one thread does the work at least"),
    # the automatic choice
    above("auto_budget_s", 0, "a trial takes some seconds"),
    at_least("auto_ranks", 1, "a run has a rank"),
    only_with(
        "auto_is_on",
        "auto",
        ("auto_budget_s", "auto_ranks", "auto_again"),
        is_on=lambda job: job.auto,
        why="they say how auto chooses",
        fix="add --auto, or leave them out",
    ),
    # an adapter
    at_least("lora_r", 1, "a pair of matrices of rank 0 is nothing"),
    at_least("lora_alpha", 1, "the pairs' results are multiplied by it"),
    within("lora_dropout", "[0, 1)", "each value is dropped with this probability, and some have to stay", 0.05),
    only_with(
        "lora_is_on",
        "lora_r",
        ("lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"),
        why="they say how an adapter learns, and no adapter is asked for",
        fix="add --lora_r 16, or leave them out",
    ),
    excludes(
        "one_number_of_bits",
        "load_in_8bit",
        ("load_in_4bit",),
        why="a frozen weight is kept in one form",
        fix="keep --load_in_8bit, which is more exact, or --load_in_4bit, which takes less memory",
    ),
    only_with(
        "rounded_weights_are_frozen",
        "lora_r",
        _BITS,
        why="weights of 8 or 4 bits cannot be trained: a step is smaller than the distance between two codes",
        fix="add --lora_r 16, which trains pairs next to the frozen weights, or leave it out",
    ),
    excludes(
        "rounded_weights_stay_as_they_are",
        _BITS,
        ("use_dora", "moe_experts"),
        why="DoRA measures the columns of the exact weights in each step, and new experts are trained completely",
    ),
    # experts
    at_least("moe_experts", 2, "a token is routed to its best experts of several"),
    at_least("moe_every", 1, "blocks are counted from 1"),
    broken_if(
        "top_k_is_1_or_2",
        ("moe_top_k",),
        lambda job: job.moe_top_k not in (None, 1, 2),
        what="moe_top_k is neither 1 nor 2",
        why="whet routes a token to its best expert, or to its two best",
        fix="use --moe_top_k 1, or --moe_top_k 2",
    ),
    above("moe_capacity_factor", 0, "an expert takes some tokens"),
    at_least("moe_aux_loss_coef", 0, "a negative weight would make the balance of the experts worse"),
    at_least("moe_z_loss_coef", 0, "a negative weight would make the logits of the routers larger"),
    only_with(
        "experts_are_asked_for",
        "moe_experts",
        ("moe_top_k", "moe_every", "moe_capacity_factor", "moe_aux_loss_coef", "moe_z_loss_coef"),
        why="they say how experts are used, and none are asked for",
        fix="add --moe_experts 8, or leave them out",
    ),
    # a teacher
    above("distillation_temperature", 0, "the logits are divided by it"),
    within("distillation_alpha", "(0, 1]", "it is the teacher's share of the loss; the labels have the rest", 0.5),
    only_with(
        "teacher_is_there",
        "teacher_model",
        ("distillation_temperature", "distillation_alpha"),
        why="they say how a teacher takes part in the loss",
        fix="add --teacher_model FOLDER, or leave them out",
    ),
)
JOB_RUN_RULES: tuple[Rule, ...] = (
    broken_if(
        "does_something",
        ("do_train", "do_eval", "do_predict"),
        lambda _, args: not (args.do_train or args.do_eval or args.do_predict),
        what="there is nothing to do",
        why="a run trains, evaluates or predicts only when asked to",
        fix="add --do_train, --do_eval or --do_predict",
    ),
    broken_if(
        "dry_run_has_a_training",
        ("dry_run", "do_train"),
        lambda job, args: job.dry_run and not args.do_train,
        what="dry_run has no training to forecast",
        why="it prints what a training would take",
        fix="add --do_train, or leave --dry_run out",
    ),
    _trains(
        "auto_trains",
        "auto",
        why="it tries training steps",
        fix="add --do_train, or leave --auto out",
    ),
    excludes(
        "one_choice_of_rows",
        "auto",
        ("auto_find_batch_size",),
        why="both choose the rows of a micro-batch, and auto knows which fit",
        fix="leave --auto_find_batch_size out",
    ),
    broken_if(
        "auto_needs_linux",
        ("auto",),
        lambda job, _: job.auto and elsewhere() is None and not is_linux(),
        what="auto chooses on Linux",
        why="it binds its trials to cores, and ends them, through calls of the Linux kernel",
        fix="leave --auto out",
    ),
    broken_if(
        "auto_starts_the_ranks",
        ("auto",),
        lambda job, _: job.auto and here().n_ranks > 1 and AUTO not in os.environ,
        what="auto is one of several ranks",
        why="it starts ranks itself where they are faster, and tries them before the run",
        fix="start one process without a launcher: it prints what it takes; or leave --auto out",
    ),
    metrics_are_the_tasks,
    seeds_are_compared,
    broken_if(
        "seeds_resume_together",
        ("seeds", "resume_from_checkpoint"),
        lambda job, args: job.seeds > 1 and args.resume_from_checkpoint not in (None, "auto"),
        what="resume_from_checkpoint names one checkpoint, and seeds trains several models",
        why="seeds that have finished are kept, and the others resume from their own newest checkpoints",
        fix="use --resume_from_checkpoint auto",
    ),
    broken_if(
        "profile_has_steps",
        ("profile", "do_train"),
        lambda _, args: args.profile and not args.do_train,
        what="profile has nothing to look at",
        why="it shows where the time of training steps goes",
        fix="add --do_train, or leave --profile out",
    ),
    *(work_has_its_file(one.asked_by, one.file) for one in SPLITS.values()),
    _trains(
        "new_rows_are_trained",
        "resize_token_embeddings",
        why="rows for new tokens begin without a meaning, and only a training gives them one",
        fix="add --do_train, or leave --resize_token_embeddings out",
    ),
    # an adapter
    _trains(
        "lora_trains",
        "lora_r",
        why="a new adapter changes nothing before it is trained",
        fix="add --do_train; to evaluate a trained adapter, merge it first: whet merge FOLDER --output_dir MERGED; or "
        "write its predictions: whet predict FOLDER --file FILE",
    ),
    excludes(
        "rounded_weights_have_plain_products",
        _BITS,
        ("zero_stage", "fsdp", "deepspeed", "torch_compile", "precision=int8", "activation_offload"),
        why="the frozen weights are read by whet's own products, in fp32 or bf16, and each rank holds all of them",
    ),
    # experts
    _trains(
        "experts_are_trained",
        "moe_experts",
        why="new experts are copies of one part, and change nothing before they are trained",
        fix="add --do_train; a folder with experts is evaluated without --moe_experts",
    ),
    broken_if(
        "experts_keep_their_blocks",
        ("reinit_layers", "moe_experts"),
        lambda job, args: job.moe_experts and args.reinit_layers and not recipes.sets(args, "reinit_layers"),
        what="reinit_layers does not go with moe_experts",
        why="experts begin as copies of pretrained weights, and reinit_layers drops these",
        fix="leave --reinit_layers or --moe_experts out",
    ),
    excludes(
        "experts_are_not_compiled",
        "moe_experts",
        ("torch_compile",),
        why=_NOT_WITH_EXPERTS["torch_compile"],
        fix="leave --torch_compile out: the products of experts are native without it",
    ),
    excludes(
        "experts_see_all_tokens",
        "moe_experts",
        ("cache_frozen_trunk",),
        why=_NOT_WITH_EXPERTS["cache_frozen_trunk"],
    ),
    # a teacher
    _trains(
        "teacher_teaches",
        "teacher_model",
        why="it takes part in the loss of a training",
        fix="add --do_train, or leave --teacher_model out",
    ),
    excludes(
        "teacher_has_the_loss_of_labels",
        "teacher_model",
        ("moe_experts", "label_smoothing_factor"),
        why=_NOT_WITH_EXPERTS["teacher_model"],
    ),
)
