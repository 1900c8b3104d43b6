"""The options of text classification, under the names of transformers' run_classification.py, and their rules."""

from dataclasses import dataclass
from typing import Literal

from whet.config.aliases import Alias
from whet.config.rules.ranges import Rule, at_least, broken_if, excludes, only_with, within
from whet.config.settings import checked
from whet.errors import Problem
from whet.jobs.fields import JobFields, Pooling
from whet.jobs.rules import delimiter_is_a_character, windows_are_joined, windows_move_on

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


METRICS = {
    "single_label_classification": ("accuracy", "f1_macro", "matthews_correlation"),
    "multi_label_classification": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("pearson", "spearmanr", "mse"),
}
"""Metrics of an evaluation, by what labels are."""
LOWER_IS_BETTER = ("mse", "loss")
_ALL = tuple(dict.fromkeys(name for names in METRICS.values() for name in names))


def metric_is_known(job: "ClassifyArguments") -> Problem | None:
    """Reported before the training, not at its first evaluation."""
    known = _known(job)
    if job.metric_name is None or job.metric_name in (*known, "loss"):
        return None
    return Problem(
        what="metric_name names no metric",
        got=job.metric_name,
        why=f"an evaluation computes {', '.join(known)}",
        fix=f"use one of these in --metric_name, such as {known[0]}",
    )


def metrics_of(job: "ClassifyArguments") -> list[str]:
    """Return the metrics that this run's evaluations may compute."""
    return [*dict.fromkeys((*_known(job), "loss", job.metric_name or "loss"))]


def _known(job: "ClassifyArguments") -> tuple[str, ...]:
    """Return the metrics of this run's evaluations, or those of all if only the data says what labels are."""
    kind = job.problem_type or ("regression" if job.do_regression else None)
    return METRICS[kind] if kind else _ALL


CLASSIFY_RULES: tuple[Rule, ...] = (
    metric_is_known,
    broken_if(
        "labels_are_one_thing",
        ("do_regression", "problem_type"),
        lambda job: (
            None not in (job.problem_type, job.do_regression)
            and job.do_regression != (job.problem_type == "regression")
        ),
        what="do_regression and problem_type contradict each other",
        why="both say what the labels are",
        fix="keep one of --do_regression and --problem_type",
    ),
    delimiter_is_a_character,
    within("threshold", "(0, 1)", "a label is predicted if its probability reaches it", 0.5),
    at_least("max_seq_length", 1, "a row holds tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    windows_are_joined,
    only_with(
        "a_shuffle_has_a_seed",
        "shuffle_train_dataset",
        ("shuffle_seed",),
        is_on=lambda job: job.shuffle_train_dataset,
        why="it is the seed of that shuffling; --data_seed is that of the order of training",
        fix="add --shuffle_train_dataset, or leave --shuffle_seed out",
    ),
    excludes(
        "delimiters_are_of_files", "dataset_name", ("csv_delimiter",), why="the columns of a dataset are cut already"
    ),
    at_least("shuffle_seed", 0, "numpy's generators take no negative seed"),
)


_HEADINGS = {"do_regression": "Labels", "max_seq_length": "Length"}

_ALIASES = {
    "remove_splits": Alias(to=None, kind=str | None, quiet=True, note="only the splits that a run uses are read"),
    "remove_columns": Alias(to=None, kind=str | None, quiet=True, note="only the columns of texts and labels are read"),
}
"""Flags of run_classification.py without effect."""


@checked(headings=_HEADINGS, rules=CLASSIFY_RULES, aliases=_ALIASES)
@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyArguments(JobFields):
    """Which model learns which labels, from which data."""

    text_column_names: str | None = None
    """Columns that hold the text, separated by commas; several are joined. null: text, sentence or another usual name,
    or the only column besides the label. The log names the choice."""
    text_pair_column_names: str | None = None
    """Columns that hold the second text of a pair, such as the answer to a question. null: sentence2, hypothesis or
    another usual name, if the first text has its counterpart; else one text a row. '': one text a row in any case."""
    text_column_delimiter: str = " "
    """What stands between the columns of a text that are joined."""
    label_column_name: str | None = None
    """Column that holds the label. null: label, labels, category or another usual name."""
    csv_delimiter: str | None = None
    """Character between the columns of CSV files. null: the one that cuts the header into most columns."""
    shuffle_train_dataset: bool = False
    """Shuffle the training examples before max_train_samples cuts them. Training takes them in random order anyway."""
    shuffle_seed: int = 42
    """Random seed of that shuffling."""

    do_regression: bool | None = None
    """true: labels are numbers to predict. false: labels are classes. null: regression if the labels are numbers with a
    decimal point."""
    problem_type: ProblemType | None = None
    """What labels are. null: lists are several labels a row, numbers with a decimal point are regression, anything else
    is one label a row. The log names the choice."""
    metric_name: str | None = None
    """Metric that load_best_model_at_end and early stopping judge by, such as accuracy or f1_macro. null: the loss. All
    metrics are computed anyway."""
    ignore_mismatched_sizes: bool = False
    """Replace the head of a model that was trained with another number of labels by a new one."""
    threshold: float = 0.5
    """With several labels a row: the probability from which a label is predicted."""

    max_seq_length: int = 128
    """Longest row in tokens, a pair's two texts together. Longer texts are cut there, unless doc_stride is given."""
    doc_stride: int | None = None
    """Cut long texts into windows of max_seq_length that share this many tokens, and predict from all of them
    (window_pooling). null: cut the text after max_seq_length; the log counts such texts."""
    window_pooling: Pooling = "mean"
    """With doc_stride: mean predicts from the mean of the windows' logits, max from the largest of each label, so that
    one window suffices for it."""
    pad_to_max_length: bool = True
    """What the log compares packing with: rows padded to max_seq_length, or with false to the longest of their batch.
    whet itself pads nothing if the model allows it."""
