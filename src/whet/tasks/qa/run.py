"""`whet qa`: from files to a trained, evaluated, saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.jobs.task import Task
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.evaluate.metrics import check_scorable
from whet.tasks.qa.rules import check_run
from whet.tasks.qa.splits import read_split
from whet.tasks.qa.summary import SHOWN
from whet.tasks.qa.types import Questions

if TYPE_CHECKING:
    from whet.jobs.job import Job


def _read(qa: QaArguments, name: str) -> Questions:
    questions = read_split(qa, name)
    if name == "validation":
        check_scorable(questions, version_2=qa.version_2_with_negative)
    return questions


def _prepare(qa: QaArguments, args: TrainingArguments, questions: Mapping[str, Questions]) -> Job:
    from whet.tasks.qa.job import prepare

    return prepare(qa, args, questions)


TASK = Task(check=check_run, read=_read, prepare=_prepare, shown=SHOWN, judged_by=("f1",))
