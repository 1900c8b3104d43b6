"""The rules of question answering: what a run, or a question asked, needs to make sense."""

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, seed
from whet.config.rules.training import output_dir_has_a_name
from whet.config.settings import broken
from whet.errors import MASK, Problem
from whet.tasks.qa.fields import AskFields, QaFields

V1_METRICS = ("exact_match", "f1")
V2_METRICS = (
    *("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
    *("best_exact", "best_f1"),
)
"""Figures of `squad_metrics` by which a model may be called best."""


def names_a_model(qa: QaFields) -> Problem | None:
    """Everything begins with pretrained weights."""
    if qa.model_name_or_path.strip():
        return None
    return Problem(
        what="no model is named",
        got="no model_name_or_path",
        why="fine-tuning starts from pretrained weights",
        fix="name a folder or a model of the hub: --model_name_or_path distilbert-base-uncased",
    )


def runs_no_foreign_code(qa: QaFields) -> Problem | None:
    """Promise 5 of the design: no code from data."""
    if not qa.trust_remote_code:
        return None
    return Problem(
        what="trust_remote_code is true",
        got=True,
        why="whet never runs code that comes with a model or a dataset: it could do anything this user may do",
        fix="leave --trust_remote_code out, and use a model that transformers itself implements",
    )


def token_is_real(qa: QaFields) -> Problem | None:
    """What --print_config wrote in place of a token is not a token."""
    if qa.token != MASK:
        return None
    return Problem(
        what="the token is masked",
        got=MASK,
        why="--print_config prints this in place of a token, so that none ends up in a file",
        fix="take token out of the config file and set HF_TOKEN, or give --token",
    )


def has_data(qa: QaFields) -> Problem | None:
    """No data, no run."""
    if qa.dataset_name or _files(qa):
        return None
    return Problem(
        what="no data is named",
        got="no dataset_name and no file",
        why="questions come from a dataset of the hub or from files",
        fix="use --dataset_name squad, or --train_file, --validation_file and --test_file",
    )


def data_from_one_place(qa: QaFields) -> Problem | None:
    """run_qa.py would ignore the files."""
    if not (qa.dataset_name and _files(qa)):
        return None
    return Problem(
        what="data is named twice",
        got={"dataset_name": qa.dataset_name, **_files(qa)},
        why="questions come from one dataset or from files, and one of them would be ignored",
        fix=f"keep --dataset_name, or --{' and --'.join(_files(qa))}",
    )


def config_of_a_dataset(qa: QaFields) -> Problem | None:
    """Files have no configurations."""
    if not qa.dataset_config_name or qa.dataset_name:
        return None
    return Problem(
        what="dataset_config_name is given without a dataset",
        got=qa.dataset_config_name,
        why="it chooses among the configurations of a dataset of the hub",
        fix="add --dataset_name, or leave --dataset_config_name out",
    )


def windows_move_on(spans: Any) -> Problem | None:
    """Windows that overlap fully would never reach the end of the context."""
    if spans.doc_stride < spans.max_seq_length:
        return None
    return Problem(
        what="doc_stride is not below max_seq_length",
        got=f"doc_stride={spans.doc_stride}, max_seq_length={spans.max_seq_length}",
        why="windows of max_seq_length tokens share doc_stride tokens, so at least one must be new",
        fix=f"use a --doc_stride below {spans.max_seq_length}, or a larger --max_seq_length",
    )


def threshold_is_read(spans: Any) -> Problem | None:
    """Without unanswerable questions there is no null answer to choose."""
    if spans.version_2_with_negative or not spans.null_score_diff_threshold:
        return None
    return Problem(
        what="null_score_diff_threshold is given, but every question has an answer",
        got=spans.null_score_diff_threshold,
        why="it decides when to answer nothing, and only --version_2_with_negative allows that",
        fix="add --version_2_with_negative, or leave --null_score_diff_threshold out",
    )


def asks_something(ask: AskFields) -> Problem | None:
    """A question is what the command is for."""
    if any(question.strip() for question in ask.question):
        return None
    return Problem(
        what="no question is asked",
        got="no question",
        why="the answer is looked up for a question",
        fix='ask one: --question "Who wrote it?"',
    )


def ask_names_a_model(ask: AskFields) -> Problem | None:
    """The model comes first on the command line."""
    if ask.model.strip():
        return None
    return Problem(
        what="no model is named",
        got="no model",
        why="a trained model finds the answer",
        fix="name the folder that whet qa wrote: whet ask out, the same as --model out",
    )


def has_a_context(ask: AskFields) -> Problem | None:
    """Extractive answers stand in a text."""
    if ask.context.strip():
        return None
    return Problem(
        what="no context is given",
        got="no context",
        why="the answer is a stretch of a text",
        fix="name a text file, --context notes.txt, or --context - to read standard input",
    )


def does_something(qa: QaFields, args: TrainingArguments) -> Problem | None:
    """As run_qa.py, nothing happens by default."""
    if args.do_train or args.do_eval or args.do_predict:
        return None
    return Problem(
        what="there is nothing to do",
        got="no do_train, do_eval or do_predict",
        why="a run trains, evaluates or predicts only when asked to",
        fix="add --do_train, --do_eval or --do_predict",
    )


def work_has_its_file(work: str, flag: str) -> Rule:
    """Return the rule that work which is asked for has its file, where the data comes from files."""

    def rule(qa: QaFields, args: TrainingArguments) -> Problem | None:
        if not getattr(args, work) or qa.dataset_name or not _files(qa) or getattr(qa, flag):
            return None
        return Problem(
            what=f"{work} has no data",
            got=_files(qa),
            why=f"with data from files, {work} reads {flag}, which is not given",
            fix=f"add --{flag}, or leave out what asks for it ({_askers(work)})",
        )

    rule.__name__ = f"{work}_has_{flag}"
    return rule


def best_metric_is_known(qa: QaFields, args: TrainingArguments) -> Problem | None:
    """Told before the training, not at its first evaluation."""
    wanted = args.metric_for_best_model
    known = V2_METRICS if qa.version_2_with_negative else V1_METRICS
    if wanted is None or wanted.removeprefix("eval_") in known:
        return None
    return Problem(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"the evaluation of answers gives {', '.join(known)}",
        fix="use one of these in --metric_for_best_model, such as f1",
    )


def profile_has_steps(qa: QaFields, args: TrainingArguments) -> Problem | None:
    """A run without training has none."""
    if not args.profile or args.do_train:
        return None
    return Problem(
        what="profile has nothing to look at",
        got="profile without do_train",
        why="it shows where the time of training steps goes",
        fix="add --do_train, or leave --profile out",
    )


def answers_are_not_smoothed(qa: QaFields, args: TrainingArguments) -> Problem | None:
    """Answers are positions, and transformers' label smoother reads the column labels."""
    if not args.label_smoothing_factor:
        return None
    return Problem(
        what="label_smoothing_factor does not go with question answering",
        got=args.label_smoothing_factor,
        why="it smooths the column labels; question answering models learn from start_positions and end_positions",
        fix="leave --label_smoothing_factor out",
    )


def check_run(qa: QaFields, args: TrainingArguments) -> list[Problem]:
    """Return what is wrong between the options of the task and those of the training."""
    return broken(RUN_RULES, qa, args)


def _files(qa: QaFields) -> dict[str, str]:
    named = {"train_file": qa.train_file, "validation_file": qa.validation_file, "test_file": qa.test_file}
    return {name: path for name, path in named.items() if path}


def _askers(work: str) -> str:
    return "--do_eval, --eval_strategy, --eval_on_start" if work == "do_eval" else f"--{work}"


SPAN_RULES: tuple[Rule, ...] = (
    at_least("max_seq_length", 1, "a window holds tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    at_least("max_answer_length", 1, "an answer has a token"),
    threshold_is_read,
)
QA_RULES: tuple[Rule, ...] = (
    names_a_model,
    runs_no_foreign_code,
    token_is_real,
    has_data,
    data_from_one_place,
    config_of_a_dataset,
    at_least("max_train_samples", 1, "training on no row is no training"),
    at_least("max_eval_samples", 1, "an evaluation of no row has no result"),
    at_least("max_predict_samples", 1, "predicting for no row gives nothing"),
    at_least("preprocessing_num_workers", 1, "one thread does the work at least"),
    *SPAN_RULES,
    at_least("n_best_size", 1, "at least one answer must be looked at"),
)
ASK_RULES: tuple[Rule, ...] = (
    ask_names_a_model,
    has_a_context,
    asks_something,
    *SPAN_RULES,
    at_least("n_best", 1, "at least one answer must be shown"),
)
DEMO_RULES: tuple[Rule, ...] = (
    output_dir_has_a_name,
    above("num_train_epochs", 0, "it is the length of the run"),
    seed("seed"),
)
RUN_RULES: tuple[Rule, ...] = (
    does_something,
    best_metric_is_known,
    profile_has_steps,
    answers_are_not_smoothed,
    work_has_its_file("do_train", "train_file"),
    work_has_its_file("do_eval", "validation_file"),
    work_has_its_file("do_predict", "test_file"),
)
