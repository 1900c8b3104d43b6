"""`whet lm`: from files to a trained, evaluated, saved language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.jobs.summary import OF_TRAINING
from whet.jobs.task import Task
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.examples import Examples
from whet.tasks.lm.rules import check_run
from whet.tasks.lm.splits import read_split

if TYPE_CHECKING:
    from whet.jobs.job import Job

SHOWN = {
    **OF_TRAINING,
    "eval_loss": ("loss", "{:.4f}"),
    "eval_rewards/accuracies": ("chosen preferred", "{:.1%}"),
    "eval_rewards/margins": ("reward margin", "{:.4f}"),
    "eval_perplexity": ("perplexity", "{:,.2f}"),
    "eval_mean_token_accuracy": ("token accuracy", "{:.1%}"),
    "predict_perplexity": ("perplexity, test", "{:,.2f}"),
    "predict_mean_token_accuracy": ("token accuracy, test", "{:.1%}"),
}


def _prepare(job: LmArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    from whet.tasks.lm.job import prepare

    return prepare(job, args, examples)


TASK = Task(
    check=check_run,
    read=read_split,
    prepare=_prepare,
    shown=SHOWN,
    judged_by=("perplexity", "loss"),
    lower_is_better=True,
)
