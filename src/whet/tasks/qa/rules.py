"""Rules of question answering: for a run, and for a question to a trained model."""

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, is_text, seed
from whet.config.rules.training import output_dir_has_a_name
from whet.config.settings import broken
from whet.errors import Problem
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, windows_move_on
from whet.jobs.task import OF_TRAINING
from whet.tasks.qa.fields import AskFields, QaFields

V1_METRICS = ("exact_match", "f1")
V2_METRICS = (
    *("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
    *("best_exact", "best_f1"),
)
"""Figures of `squad_metrics` by which a model may be called best."""

SHOWN = {
    **OF_TRAINING,
    "train_samples_per_second": ("windows a second", "{:,.2f}"),
    "eval_exact_match": ("exact match", "{:.2f}"),
    "eval_exact": ("exact match", "{:.2f}"),
    "eval_f1": ("F1", "{:.2f}"),
    "eval_HasAns_f1": ("F1, answerable", "{:.2f}"),
    "eval_NoAns_f1": ("F1, unanswerable", "{:.2f}"),
    "predict_f1": ("F1 of the predictions", "{:.2f}"),
}
"""The metrics of the table at the end of a run."""


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
    """Extractive answers need a text."""
    if ask.context.strip():
        return None
    return Problem(
        what="no context is given",
        got="no context",
        why="the answer is a stretch of a text",
        fix="name a text file, --context notes.txt, or --context - to read standard input",
    )


def best_metric_is_known(qa: QaFields, args: TrainingArguments) -> Problem | None:
    """Reported before the training, not at its first evaluation."""
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
    """Return the problems between the options of the task and those of the training."""
    return broken(RUN_RULES, qa, args)


SPAN_RULES: tuple[Rule, ...] = (
    at_least("max_seq_length", 1, "a window holds tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    at_least("max_answer_length", 1, "an answer has a token"),
    threshold_is_read,
)
QA_RULES: tuple[Rule, ...] = (
    *JOB_RULES,
    *SPAN_RULES,
    at_least("n_best_size", 1, "at least one answer must be looked at"),
)
ASK_RULES: tuple[Rule, ...] = (
    ask_names_a_model,
    has_a_context,
    asks_something,
    is_text("question"),
    *SPAN_RULES,
    at_least("n_best", 1, "at least one answer must be shown"),
)
DEMO_RULES: tuple[Rule, ...] = (
    output_dir_has_a_name,
    above("num_train_epochs", 0, "it is the length of the run"),
    seed("seed"),
)
RUN_RULES: tuple[Rule, ...] = (*JOB_RUN_RULES, best_metric_is_known, answers_are_not_smoothed)
