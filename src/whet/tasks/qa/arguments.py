"""The options of question answering, with the names and defaults of the guides' `run_qa.py`, and their rules."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whet.config.rules.ranges import Rule, above, at_least, broken_if, is_given, is_text, only_with, seed
from whet.config.rules.training import output_dir_has_a_name
from whet.config.settings import checked
from whet.errors import DataError
from whet.jobs.fields import JobFields
from whet.jobs.rules import windows_move_on

V1_METRICS = ("exact_match", "f1")
V2_METRICS = (
    *("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
    *("best_exact", "best_f1"),
)
"""Figures of `squad_metrics` by which a model may be called best."""


SPAN_RULES: tuple[Rule, ...] = (
    at_least("max_seq_length", 1, "a window holds tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    at_least("max_answer_length", 1, "an answer has a token"),
    only_with(
        "threshold_is_read",
        "version_2_with_negative",
        ("null_score_diff_threshold",),
        is_on=lambda spans: spans.version_2_with_negative is not False,
        why="it decides when to answer nothing, and only --version_2_with_negative allows that",
        fix="add --version_2_with_negative, or leave --null_score_diff_threshold out",
    ),
)
QA_RULES: tuple[Rule, ...] = (
    *SPAN_RULES,
    at_least("n_best_size", 1, "at least one answer must be looked at"),
)
ASK_RULES: tuple[Rule, ...] = (
    is_given(
        "ask_names_a_model",
        "model",
        what="no model is named",
        why="a trained model finds the answer",
        fix="name the folder that whet qa wrote: whet ask out, the same as --model out",
    ),
    is_given(
        "has_a_context",
        "context",
        what="no context is given",
        why="the answer is a stretch of a text",
        fix="name a text file, --context notes.txt, or --context - to read standard input",
    ),
    broken_if(
        "asks_something",
        ("question",),
        lambda ask: not any(question.strip() for question in ask.question),
        what="no question is asked",
        why="the answer is looked up for a question",
        fix='ask one: --question "Who wrote it?"',
    ),
    is_text("question"),
    *SPAN_RULES,
    at_least("n_best", 1, "at least one answer must be shown"),
)
DEMO_RULES: tuple[Rule, ...] = (
    output_dir_has_a_name,
    above("num_train_epochs", 0, "it is the length of the run"),
    seed("seed"),
)


@checked(headings={"version_2_with_negative": "Answers"}, rules=QA_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class QaArguments(JobFields):
    """The model, the data, and the choice of an answer."""

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


@checked(headings={"model": "Question", "version_2_with_negative": "Answers"}, rules=ASK_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class AskArguments:
    """The model, the questions and the text."""

    model: str = field(default="", metadata={"required": True})
    """Model that was trained for question answering: a folder, with all weights or an adapter, or a name on the hub.
    Comes first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    context: str = field(default="", metadata={"required": True})
    """UTF-8 text file that contains the answer. - reads standard input."""
    question: Sequence[str] | str = field(default=(), metadata={"required": True, "kind": tuple[str, ...]})
    """The question. Repeat the flag to ask more questions about the same text."""
    max_seq_length: int | None = None
    """Longest row in tokens, question and text together. Longer texts are cut into overlapping windows. null: as in the
    training, else 384."""
    doc_stride: int | None = None
    """Tokens that two neighbouring windows share. null: as in the training, else 128."""

    version_2_with_negative: bool | None = None
    """Allow "no answer" as the answer, for models trained with such questions, as in SQuAD v2.0. null: as in the
    training."""
    null_score_diff_threshold: float | None = None
    """Answer nothing if "no answer" scores higher than the best answer by more than this. Higher answers more often.
    Needs version_2_with_negative. null: as in the training, else 0."""
    n_best: int = 3
    """Answers to show for each question, best first."""
    max_answer_length: int | None = None
    """Longest answer in tokens. null: as in the training, else 30."""

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
    num_train_epochs: float = 2.0
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
