"""Collects the questions of readers, checks each, and reports all problems at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.data.files.bad_rows import BadRows, Place
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, text_field
from whet.jobs.left_out import LeftOut
from whet.tasks.qa.read.question import answers_field, id_field
from whet.tasks.qa.types import Answers, Questions


class Collector:
    """Collects questions: every context is stored once, and bad rows are counted."""

    def __init__(self, source: str, *, limit: int | None, require_answers: bool, skip_bad: bool = False) -> None:
        self.bad = BadRows(source, skip_bad=skip_bad)
        self.require_answers = require_answers
        self.fields: dict[str, None] = {}
        """What rows, or the parts of a nested document, have; those that hold no other parts."""
        self._limit = limit
        self._ids: dict[str, Place] = {}
        self._titles: list[str] = []
        self._questions: list[str] = []
        self._answers: list[Answers] = []
        self._context_of: list[int] = []
        self._contexts: dict[str, int] = {}
        self._n_seen = 0

    @property
    def full(self) -> bool:
        """Whether the limit is reached and readers may stop."""
        return self._limit is not None and self._n_seen >= self._limit

    def see(self, part: Any) -> None:
        """Note the fields of a row, an article, a paragraph or a question."""
        if isinstance(part, Mapping) and not part.keys() <= self.fields.keys():
            self.fields |= {name: None for name in part if name not in ("paragraphs", "qas")}

    def add(self, row: Any, *, context: str, title: str, place: Place) -> None:
        """Check the question of this row and store it. The context and the title were checked before."""
        self._n_seen += 1
        self.see(row)
        try:
            if not isinstance(row, Mapping):
                raise not_an_object(row)
            name = id_field(row)
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
            return self.bad.add(problem, place)
        self._ids[name] = place
        self._titles.append(title)
        self._questions.append(question)
        self._answers.append(answers)
        self._context_of.append(self._contexts.setdefault(context, len(self._contexts)))
        return None

    def add_row(self, row: Any, place: Place) -> None:
        """Check and store a complete row: id, title, context, question and answers."""
        try:
            if not isinstance(row, Mapping):
                raise not_an_object(row)
            context, title = text_field(row, "context"), title_field(row)
        except Rejected as problem:
            self._n_seen += 1
            return self.bad.add(problem, place)
        return self.add(row, context=context, title=title, place=place)

    def finish(self) -> Questions:
        """Return the questions; raise one DataError about the problems, or about missing questions."""
        self.bad.refuse(len(self._ids), "question")
        return Questions(
            ids=list(self._ids),
            questions=self._questions,
            answers=self._answers,
            context_of=np.asarray(self._context_of, dtype=np.int64),
            contexts=list(self._contexts),
            titles=self._titles if any(self._titles) else (),
            left_out=LeftOut.of(self.bad),
            fields=list(self.fields),
        )


def title_field(row: Mapping[str, Any]) -> str:
    """Return the title, which is optional."""
    title = row.get("title")
    if title is None:
        return ""
    if type(title) is int:
        return str(title)
    if not isinstance(title, str):
        raise Rejected(
            f"title is {kind(title)}", got=title, why="it has to be a text", fix="write a text, or leave it out"
        )
    return title


def not_an_object(value: Any) -> Rejected:
    """Return the problem of a value that should have named fields."""
    return Rejected(
        f"this is {kind(value)}, not an object",
        got=value,
        why="articles, paragraphs and questions are JSON objects with named fields",
        fix="write an object here",
    )
