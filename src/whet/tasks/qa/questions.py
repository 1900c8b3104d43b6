"""Questions with their answers: each is checked when it is collected, and all problems are reported at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.data.files.bad_rows import BadRows, Place
from whet.data.files.json_text import parse_json, skip_space
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, text_field
from whet.jobs.left_out import LeftOut
from whet.tasks.qa.types import Answers, Questions

_SAMPLE = 60
_MAX_PLACES = 3


def id_field(row: Mapping[str, Any]) -> str:
    """Return the id of the row; a whole number becomes a text, as in the files of Haystack."""
    value = row.get("id")
    # type(value) is int, not isinstance: True is an int to Python
    return str(value) if type(value) is int else text_field(row, "id")


def answers_field(row: Mapping[str, Any], context: str, *, required: bool) -> Answers:
    """Return the answers of the row, each checked to be at its offset; empty if the context has none.

    Three ways of writing them are read: a list of {text, answer_start}, one such object, and {text: [...],
    answer_start: [...]}. Of a question that is impossible, an empty answer is none.
    """
    impossible = _impossible(row.get("is_impossible"))
    value = row.get("answers")
    if value is None and not (required and "answers" not in row and not impossible):
        texts, starts = [], []
    else:
        texts, starts = _columns(_from_cell(value), present="answers" in row)
    if impossible and all(text is None or (isinstance(text, str) and not text.strip()) for text in texts):
        return _NO_ANSWERS
    starts = [whole_number(start) for start in starts]
    for text, start in zip(texts, starts, strict=True):
        if type(start) is int and start >= 0 and isinstance(text, str) and context.startswith(text, start):
            if not text or text.isspace():
                raise _empty_answer()
        else:
            raise _misplaced(text, start, context)
    answers = Answers(texts=tuple(texts), starts=tuple(starts)) if texts else _NO_ANSWERS
    _check_impossible(impossible, answers, required=required)
    return answers


_NO_ANSWERS = Answers()
_WHOLE = re.compile(r"\s*(-?\d{1,18})(?:\.0*)?\s*")
"""A whole number as a text; pandas adds .0 if a column has gaps."""


def whole_number(value: Any) -> Any:
    """Return the whole number that a text or a float holds; any other value as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else value


def _from_cell(value: Any) -> Any:
    """Return the value of a table's cell: CSV can store the answers only as JSON text, and none as an empty one."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        answers, end = parse_json(value, skip_space(value))
        if skip_space(value, end) == len(value):
            return answers
        reason = "more follows after the JSON value"
    except Rejected as problem:
        reason = problem.what
    raise Rejected(
        f"answers cannot be read as JSON: {reason}",
        got=value,
        why="a table without lists keeps the answers as the text of one JSON value",
        fix="write the cell with json.dumps",
    )


def _columns(value: Any, *, present: bool) -> tuple[list[Any], list[Any]]:
    """Return the texts and the starts, in lists of equal length, with unchecked elements."""
    if isinstance(value, list) and all(isinstance(answer, dict) for answer in value):
        return [answer.get("text") for answer in value], [answer.get("answer_start") for answer in value]
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, str) and not isinstance(starts, list | dict):
            return [texts], [starts]
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return texts, starts
    raise Rejected(
        "answers does not hold texts and their places" if present else "answers is missing",
        got=value,
        why='answers is [{"text": ..., "answer_start": ...}], or {"text": [...], "answer_start": [...]} of one length',
        fix="write it so; a question without an answer has an empty list",
    )


def _empty_answer() -> Rejected:
    return Rejected(
        "an answer is empty",
        why="an answer is a stretch of the context",
        fix="remove the answer; a question without an answer has an empty list",
    )


def _misplaced(text: Any, start: Any, context: str) -> Rejected:
    """Return why this answer is not at this start."""
    if text == "":
        return _empty_answer()
    if not isinstance(text, str):
        return Rejected(
            f"the text of an answer is {kind(text)}",
            got=text,
            why="it has to be a text",
            fix="write it as a JSON string",
        )
    if type(start) is not int:
        return Rejected(
            f"answer_start of {text[:_SAMPLE]!r} is {kind(start)}",
            got=start,
            why="it has to be a whole number, the index of the answer's first character",
            fix=f"write a whole number; {_real_places(text, None, context)}",
        )
    inside = 0 <= start < len(context)
    here = (
        f"the context has {context[start : start + len(text)][:_SAMPLE]!r} at {start}"
        if inside
        else (f"the context ends at {len(context)}, and {start} is outside of it")
    )
    return Rejected(
        "an answer does not stand where answer_start says",
        got=f"{text[:_SAMPLE]!r} should stand at {start}; {here}",
        why="the context from answer_start on, counted in characters (code points) from 0, begins with the answer",
        fix=_real_places(text, start, context),
    )


def _real_places(text: str, start: int | None, context: str) -> str:
    """Return the correct answer_start, from the occurrences of the text in the context."""
    places: list[int] = []
    while text and len(places) <= _MAX_PLACES and (at := context.find(text, places[-1] + 1 if places else 0)) >= 0:
        places.append(at)
    if not places:
        return "the text occurs nowhere in the context: correct the text or remove the answer"
    shown = ", ".join(map(str, places[:_MAX_PLACES])) + (", ..." if len(places) > _MAX_PLACES else "")
    advice = f"the text occurs at {shown}: correct answer_start"
    return advice + next((f" (it was counted in {unit})" for unit in _other_units(start, places, context)), "")


def _other_units(start: int | None, places: list[int], context: str) -> list[str]:
    """Return the units, other than code points, in which `start` would be correct."""
    units = (("UTF-16 units, as Java and JavaScript count", "utf-16-le", 2), ("UTF-8 bytes", "utf-8", 1))
    return [
        words
        for words, encoding, width in units
        if any(place != start == len(context[:place].encode(encoding)) // width for place in places)
    ]


def _impossible(flag: Any) -> bool | None:
    """Return whether the question is marked as impossible; None if nothing is said."""
    if flag is None or isinstance(flag, bool):
        return flag
    said = flag.strip().lower() if isinstance(flag, str) else flag if type(flag) is int else None
    if said in _FLAGS:
        return _FLAGS[said]
    raise Rejected(
        f"is_impossible is {kind(flag)}", got=flag, why="it has to be true or false", fix="write true or false"
    )


_FLAGS = {"": None, "true": True, "1": True, 1: True, "false": False, "0": False, 0: False}
"""What tables hold in place of true and false."""


def _check_impossible(impossible: bool | None, answers: Answers, *, required: bool) -> None:
    if impossible and answers.texts:
        raise Rejected(
            "is_impossible is true, but the question has answers",
            got=list(answers.texts[:_MAX_PLACES]),
            why="a question is either answerable or not",
            fix="set is_impossible to false, or move the answers to plausible_answers",
        )
    if impossible is False and not answers.texts and required:
        raise Rejected(
            "is_impossible is false, but the question has no answers",
            why="a question is either answerable or not",
            fix="add the answer, or set is_impossible to true",
        )


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
