"""`whet classify`: from files to a trained, evaluated, saved classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.jobs.summary import OF_TRAINING
from whet.jobs.task import Task
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.examples import Examples
from whet.tasks.classify.rules import check_run
from whet.tasks.classify.splits import read_split

if TYPE_CHECKING:
    from whet.jobs.job import Job

_SHOWN = {
    **OF_TRAINING,
    "eval_loss": ("loss", "{:.4f}"),
    "eval_accuracy": ("accuracy", "{:.2%}"),
    "eval_f1_micro": ("F1, micro", "{:.4f}"),
    "eval_f1_macro": ("F1, macro", "{:.4f}"),
    "eval_matthews_correlation": ("Matthews' correlation", "{:.4f}"),
    "eval_pearson": ("Pearson's correlation", "{:.4f}"),
    "eval_spearmanr": ("Spearman's correlation", "{:.4f}"),
    "eval_mse": ("mean squared error", "{:.4f}"),
    "predict_accuracy": ("accuracy, test", "{:.2%}"),
    "predict_pearson": ("Pearson's, test", "{:.4f}"),
}


def _prepare(job: ClassifyArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    from whet.tasks.classify.job import prepare

    return prepare(job, args, examples)


def _tables(job: Job) -> Sequence[str]:
    from whet.tasks.classify.job import tables

    return tables(job)


TASK = Task(
    check=check_run,
    read=read_split,
    prepare=_prepare,
    shown=_SHOWN,
    tables=_tables,
    judged_by=("f1_micro", "accuracy", "pearson"),
)
