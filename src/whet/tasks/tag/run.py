"""`whet tag`: from files to a trained, evaluated, saved tagger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.jobs.summary import OF_TRAINING
from whet.jobs.task import Task
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.rules import check_run
from whet.tasks.tag.sentences import Sentences
from whet.tasks.tag.splits import read_split

if TYPE_CHECKING:
    from whet.jobs.job import Job

_SHOWN = {
    **OF_TRAINING,
    "train_samples_per_second": ("sentences a second", "{:,.2f}"),
    "eval_loss": ("loss", "{:.4f}"),
    "eval_accuracy": ("accuracy of words", "{:.2%}"),
    "eval_precision": ("precision of entities", "{:.4f}"),
    "eval_recall": ("recall of entities", "{:.4f}"),
    "eval_f1": ("F1 of entities", "{:.4f}"),
    "eval_f1_macro": ("F1 of tags, macro", "{:.4f}"),
    "predict_accuracy": ("accuracy, test", "{:.2%}"),
    "predict_f1": ("F1 of entities, test", "{:.4f}"),
}


def _prepare(job: TagArguments, args: TrainingArguments, sentences: Mapping[str, Sentences]) -> Job:
    from whet.tasks.tag.job import prepare

    return prepare(job, args, sentences)


TASK = Task(check=check_run, read=read_split, prepare=_prepare, shown=_SHOWN, judged_by=("f1", "accuracy"))
