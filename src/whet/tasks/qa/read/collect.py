"""Gathers the questions that readers find, checks each, and tells at the end what was wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from whet.errors import DataError, Problem
from whet.tasks.qa.read.question import answers_field, kind, text_field
from whet.tasks.qa.read.rejected import Rejected
from whet.tasks.qa.types import Answers, Questions

MAX_SHOWN = 10
"""Problems told in full; more would hide the first."""

Place = Callable[[], str]
"""Says where something stands. A function, as the text is wanted for bad data only."""


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """Keep Python from looking for reference cycles in between.

    Reading makes a million objects without one cycle; looking them through again and again took as long as the reading.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Collector:
    """Questions in the making: every context is kept once, every problem is counted, the first few are kept."""

    def __init__(self, source: str, *, limit: int | None, require_answers: bool, skip_bad: bool = False) -> None:
        self.source = source
        self.require_answers = require_answers
        self._skip_bad = skip_bad
        self._limit = limit
        self._ids: dict[str, Place] = {}
        self._titles: list[str] = []
        self._questions: list[str] = []
        self._answers: list[Answers] = []
        self._context_of: list[int] = []
        self._contexts: dict[str, int] = {}
        self._problems: list[Problem] = []
        self._n_problems = 0
        self._n_left_out = 0
        self._n_seen = 0

    @property
    def full(self) -> bool:
        """Whether the limit is reached, so that readers may stop."""
        return self._limit is not None and self._n_seen >= self._limit

    def add(self, row: Any, *, context: str, title: str, place: Place) -> None:
        """Check the question of this row and keep it. The context and the title have been checked before."""
        self._n_seen += 1
        try:
            if not isinstance(row, Mapping):
                raise not_an_object(row)
            name = text_field(row, "id")
            question = text_field(row, "question")
            answers = answers_field(row, context, required=self.require_answers)
            if name in self._ids:
                raise Rejected(
                    "the id has been used before",
                    got=name,
                    why=f"predictions are kept by id; the first use is {self._ids[name]()}",
                    fix="give each question an id of its own",
                )
        except Rejected as problem:
            return self.reject(problem, place)
        self._ids[name] = place
        self._titles.append(title)
        self._questions.append(question)
        self._answers.append(answers)
        self._context_of.append(self._contexts.setdefault(context, len(self._contexts)))
        return None

    def add_row(self, row: Any, place: Place) -> None:
        """Check and keep a row that holds everything: id, title, context, question and answers."""
        try:
            if not isinstance(row, Mapping):
                raise not_an_object(row)
            context, title = text_field(row, "context"), title_field(row)
        except Rejected as problem:
            self._n_seen += 1
            return self.reject(problem, place)
        return self.add(row, context=context, title=title, place=place)

    def reject(self, problem: Rejected, place: Place, n_questions: int = 1) -> None:
        """Count a problem and the questions that it spoils; keep it if it is one of the first, or if all are named."""
        self._n_problems += 1
        self._n_left_out += n_questions
        if self._skip_bad or len(self._problems) < MAX_SHOWN:
            self._problems.append(problem.at(f"{self.source}: {place()}"))

    def finish(self) -> Questions:
        """Return the questions; raise one DataError that tells the problems, or that there is nothing at all."""
        if self._n_problems and not (self._skip_bad and self._ids):
            raise DataError.of([*self._problems[:MAX_SHOWN], *self._summary()])
        if not self._ids:
            raise DataError(
                what=f"{self.source}: there is no question in it",
                why="there is nothing to train on, to evaluate or to answer",
                fix="name another file or split",
            )
        return Questions(
            ids=list(self._ids),
            questions=self._questions,
            answers=self._answers,
            context_of=np.asarray(self._context_of, dtype=np.int64),
            contexts=list(self._contexts),
            titles=self._titles if any(self._titles) else (),
            left_out=self._problems,
            n_left_out=self._n_left_out,
        )

    def _summary(self) -> list[Problem]:
        if self._n_problems <= MAX_SHOWN and self._ids:
            return []
        found = f"{self._n_problems} problems in all"
        more = f"; the first {MAX_SHOWN} are listed above" if self._n_problems > MAX_SHOWN else ""
        none = "; not one question can be used" if not self._ids else ""
        return [
            Problem(
                what=f"{self.source}: {found}{more}{none}",
                why="a run on what is left would be a run on other data than you named",
                fix="correct the data" + (", or leave these out: --skip_bad" if self._ids else ""),
            )
        ]


def title_field(row: Mapping[str, Any]) -> str:
    """Return the title, which data sets may leave out."""
    title = row.get("title")
    if title is None:
        return ""
    if not isinstance(title, str):
        raise Rejected(
            f"title is {kind(title)}", got=title, why="it has to be a text", fix="write a text, or leave it out"
        )
    return title


def not_an_object(value: Any) -> Rejected:
    """Return the problem of a value that should have had named fields."""
    return Rejected(
        f"this is {kind(value)}, not an object",
        got=value,
        why="articles, paragraphs and questions are JSON objects with named fields",
        fix="write an object here",
    )
