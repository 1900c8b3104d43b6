"""The options of question answering, with the names and defaults of the guides' `run_qa.py`, and their rules."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, is_text, seed
from whet.config.rules.training import output_dir_has_a_name
from whet.config.settings import broken, checked, printable
from whet.errors import DataError, Problem
from whet.jobs.fields import OFF, REFUSED, JobFields
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, windows_move_on
from whet.jobs.task import OF_TRAINING


@dataclass(frozen=True, kw_only=True, slots=True)
class QaFields(JobFields):
    """The settings of a question answering run before validation."""

    train_file: str | None = None
    """File with the questions to train on: SQuAD's JSON, or one row a question as JSON lines, CSV or Parquet."""
    validation_file: str | None = None
    """File with the questions to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the questions to predict answers for, in any format of train_file."""
    max_seq_length: int = 384
    """Longest row in tokens, question and context together. Longer contexts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share. An answer no longer than this lies completely in one of them."""
    pad_to_max_length: bool = True
    """The padded length that padding_in_loss and the printed figures assume. true: max_seq_length. false: the longest
    row of a batch. whet itself packs rows without padding."""

    version_2_with_negative: bool = False
    """Some questions have no answer in their context, as in SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Give no answer if "no answer" scores higher than the best answer by more than this. A higher value answers more
    often. Needs version_2_with_negative."""
    n_best_size: int = 20
    """Number of candidate starts and ends in each window, and of answers kept for each question."""
    max_answer_length: int = 30
    """Longest answer in tokens. The model predicts start and end separately; this limits their distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFields:
    """The settings of `whet ask` before validation."""

    model: str = field(default="", metadata={"required": True})
    """Model that was trained for question answering: a folder, with all weights or an adapter, or a name on the hub.
    Comes first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    context: str = field(default="", metadata={"required": True})
    """UTF-8 text file that contains the answer. - reads standard input."""
    question: Sequence[str] | str = field(default=(), metadata={"required": True, "kind": tuple[str, ...]})
    """The question. Repeat the flag to ask more questions about the same text."""
    max_seq_length: int = 384
    """Longest row in tokens, question and text together. Longer texts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share."""

    version_2_with_negative: bool = False
    """Allow "no answer" as the answer. For models trained with such questions, as in SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Answer nothing if "no answer" scores higher than the best answer by more than this. Higher answers more often.
    Needs version_2_with_negative."""
    n_best: int = 3
    """Answers to show for each question, best first."""
    max_answer_length: int = 30
    """Longest answer in tokens."""


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


_QA_HEADINGS = {"model_name_or_path": "Model", "dataset_name": "Data", "version_2_with_negative": "Answers"}


@checked(headings=_QA_HEADINGS, rules=QA_RULES, refused=REFUSED, off=OFF)
@dataclass(frozen=True, kw_only=True, slots=True)
class QaArguments(QaFields):
    """The model, the data, and the choice of an answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)


@checked(headings={"model": "Question", "version_2_with_negative": "Answers"}, rules=ASK_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class AskArguments(AskFields):
    """The model, the questions and the text."""

    def read_context(self) -> str:
        """Return the text that `context` names; raises DataError if it cannot be read or is blank."""
        source = "standard input" if self.context == "-" else self.context
        try:
            raw = sys.stdin.buffer.read() if self.context == "-" else Path(self.context).read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_context(source, str(error)) from error
        if not text.strip():
            raise _bad_context(source, "it holds no text")
        return text


@checked(headings={"output_dir": "Demo"}, rules=DEMO_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoArguments:
    """How the demonstration is run."""

    output_dir: str = "whet-demo"
    """Folder for the trained model and its results."""
    num_train_epochs: float = 4.0
    """How often every row is seen. 0.5 stops after half of the rows."""
    seed: int = 42
    """Random seed of new weights, dropout and row order."""


def _bad_context(source: str, why: str) -> DataError:
    return DataError(
        what="the context cannot be read",
        got=source,
        why=why,
        fix="name a UTF-8 text file in --context, or pipe one in with --context -",
    )
