"""Questions from a file in any form of SQuAD-like data, or from a data set of the hub; the content says which form.

Each question is checked when it is collected, with its answers, and all problems are reported at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.files.bad_rows import BadRows, Place, Rejected, no_cycle_search
from whet.data.files.cells import column_values, refuse_twice
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import json_lines, parse_json, place_in, skip_space
from whet.data.files.row_fields import kind, text_field
from whet.jobs.left_out import LeftOut
from whet.tasks.qa.types import Answers, Questions

if TYPE_CHECKING:
    import pyarrow

    from whet.jobs.hub_data import HubSource

COLUMNS = ("id", "title", "context", "question", "answers")
ANSWER_COLUMNS = ("answer_text", "answer_start")
"""Columns that may replace `answers`: one answer per row."""
TEXTS = (*COLUMNS, *ANSWER_COLUMNS)
READ = (*TEXTS, "is_impossible")


def read_rows(rows: Iterable[tuple[str, Any]], collector: Collector) -> None:
    """Pass every (position, row) to the collector; the first row must have the columns."""
    for n, (place, row) in enumerate(rows):
        if collector.full:
            return
        if n == 0 and isinstance(row, Mapping):
            check_columns(list(row), collector)
        collector.add_row(_with_answers(row), partial(_row_place, place, row))


def read_table(table: pyarrow.Table, collector: Collector) -> None:
    """Pass every row of an Arrow table to the collector."""
    refuse_twice(table.column_names)
    collector.see(dict.fromkeys(table.column_names))
    check_columns(table.column_names, collector)
    wanted = [name for name in READ if name in table.column_names]
    read_columns({name: column_values(table.column(name)) for name in wanted}, collector)


def read_columns(columns: Mapping[str, Sequence[Any]], collector: Collector) -> None:
    """Pass every row of these columns to the collector."""
    check_columns(list(columns), collector)
    collector.see(columns)
    wanted = [name for name in READ if name in columns]
    rows = (dict(zip(wanted, row, strict=True)) for row in zip(*(columns[name] for name in wanted), strict=True))
    read_rows(((f"row {n}", row) for n, row in enumerate(rows)), collector)


def check_columns(found: Sequence[str], collector: Collector) -> None:
    """Refuse rows with other columns than those of SQuAD."""
    apart = "answers" not in found and any(name in found for name in ANSWER_COLUMNS)
    answers = ANSWER_COLUMNS[:1] if apart else ("answers",)
    said = collector.require_answers and "is_impossible" not in found  # an impossible question needs no answers
    needed = ["id", "context", "question", *(answers if said else ())]
    missing = [name for name in needed if name not in found]
    if collector.takes_answers and "answers" in found and any(name in found for name in ANSWER_COLUMNS):
        raise Rejected(
            "the answers are given twice",
            got=", ".join(name for name in found if name in ("answers", *ANSWER_COLUMNS)),
            why="it is not known which of them are meant",
            fix="keep the column answers, or the columns answer_text and answer_start",
        )
    if missing:
        raise Rejected(
            f"the column{'s' if len(missing) > 1 else ''} {', '.join(missing)} {_are(missing)} missing",
            got=f"columns found: {', '.join(map(str, found)) or 'none'}",
            why="a question needs id, context and question, and answers or answer_text and answer_start",
            fix=f"rename the columns that hold them, or add them: {', '.join(missing)}",
        )


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _with_answers(row: Any) -> Any:
    """Return the row with `answers`, made from answer_text and answer_start if it has these instead.

    Without a column answer_start, an answer stands where the context has its text, if that is in one place.
    """
    if not isinstance(row, Mapping) or "answers" in row or not any(name in row for name in ANSWER_COLUMNS):
        return row
    text, start = (row.get(name) for name in ANSWER_COLUMNS)
    if isinstance(text, list):
        return {**row, "answers": {"text": text, "answer_start": start}}
    context = row.get("context")
    if "answer_start" not in row and text and isinstance(text, str) and isinstance(context, str):
        at = context.find(text)
        start = at if at >= 0 and context.find(text, at + 1) < 0 else None
    none = text in (None, "") and (start in (None, "", -1, "-1") or start != start)  # NaN: a missing value of pandas
    return {**row, "answers": [] if none else [{"text": text, "answer_start": start}]}


def _row_place(place: str, row: Any) -> str:
    name = row.get("id") if isinstance(row, Mapping) else None
    return f"{place}, question {str(name)[:80]!r}" if isinstance(name, str | int) and name != "" else place


def read_nested(articles: Iterable[tuple[str, Any]], collector: Collector) -> None:
    """Pass every question of these articles, SQuAD 1.1 or 2.0, to the collector; of each its position comes first.

    An article may be a paragraph that stands alone: a context with its `qas`.
    """
    for path, article in articles:
        if collector.full:
            return
        collector.see(article)
        try:
            inside = [(path, article)] if is_paragraph(article) else _paragraphs(path, article)
            title = title_field(article)
        except Rejected as problem:
            collector.bad.add(problem, partial(_article_place, path, article), _n_questions(article))
            continue
        for place, paragraph in inside:
            _read_paragraph(paragraph, place, title, collector)


def is_paragraph(value: Any) -> bool:
    """Return whether this is a context with its questions, and not an article of several."""
    return isinstance(value, Mapping) and "qas" in value and "paragraphs" not in value


def _paragraphs(path: str, article: Any) -> list[tuple[str, Any]]:
    return [(f"{path}.paragraphs[{n}]", one) for n, one in enumerate(_list_field(article, "paragraphs"))]


def _read_paragraph(paragraph: Any, path: str, title: str, collector: Collector) -> None:
    collector.see(paragraph)
    try:
        questions = _list_field(paragraph, "qas")
        if not questions:
            return None  # also without a context: annotation tools keep the paragraphs that nobody has asked about
        context = text_field(paragraph, "context")
    except Rejected as problem:
        return collector.bad.add(problem, partial(_paragraph_place, path, title), _n_questions(paragraph))
    for q, question in enumerate(questions):
        if collector.full:
            return None
        place = partial(_question_place, path, q, title, question)
        collector.add(question, context=context, title=title, place=place)
    return None


def _list_field(owner: Any, name: str) -> list[Any]:
    """Return this list of an article or a paragraph; null is an empty one."""
    if not isinstance(owner, Mapping):
        raise not_an_object(owner)
    value = owner.get(name)
    if value is None and name in owner:
        return []
    if not isinstance(value, list):
        raise Rejected(
            f"{name} is {kind(value)}, not a list" if name in owner else f"{name} is missing",
            got=value if name in owner else sorted(map(str, owner)),
            why="articles hold a list of paragraphs, and paragraphs a list of qas",
            fix=f"write {name} as a list",
        )
    return value


def _n_questions(part: Any) -> int:
    """Return the number of readable questions in an article or a paragraph."""
    if not isinstance(part, Mapping):
        return 0
    qas, paragraphs = part.get("qas"), part.get("paragraphs")
    if isinstance(qas, list):
        return len(qas)
    return sum(map(_n_questions, paragraphs)) if isinstance(paragraphs, list) else 0


def _article_place(path: str, article: Any) -> str:
    title = article.get("title") if isinstance(article, Mapping) else None
    return f"{path}{_named('article', title)}"


def _paragraph_place(path: str, title: str) -> str:
    return f"{path}{_named('article', title)}"


def _question_place(path: str, index: int, title: str, question: Any) -> str:
    name = question.get("id") if isinstance(question, Mapping) else None
    return f"{path}.qas[{index}]{_named('article', title)}{_named('question', name)}"


def _named(what: str, name: Any) -> str:
    return f", {what} {str(name)[:80]!r}" if isinstance(name, str | int) and name != "" else ""


_TELLING = {"context", "question", "answers"}


def read_questions(
    path: Path,
    *,
    limit: int | None = None,
    require_answers: bool = True,
    takes_answers: bool = True,
    skip_bad: bool = False,
) -> Questions:
    """Return the questions of a file, the first `limit` of them if a limit is given.

    Read are SQuAD's nested JSON (1.1 and 2.0), and its paragraphs without articles around them; one row a question,
    with the columns id, context, question, answers and perhaps title, as {"data": [...]}, a list, JSON lines, CSV (the
    answers as JSON text) or Parquet. The columns answer_text and answer_start may take the place of answers. Without
    `require_answers` the answers may be missing; without `takes_answers` no question has any, whatever the file says.
    Everything is checked before anything is returned: DataError reports the first problems, each with its place, and
    how many there are. With `skip_bad` the result holds the good questions and names the bad.
    """
    collector = Collector(
        str(path), limit=limit, require_answers=require_answers, takes_answers=takes_answers, skip_bad=skip_bad
    )
    try:
        data = read_bytes(Path(path))
        with no_cycle_search():
            if data.startswith(PARQUET):
                from whet.data.files.parquet import parquet_columns

                read_columns(parquet_columns(data, READ), collector)
            else:
                _read_text(text_of(data), data, collector, Path(path))
    except Rejected as problem:
        raise problem.error(str(path)) from None
    return collector.finish()


def _read_text(text: str, data: bytes, collector: Collector, path: Path) -> None:
    begin = skip_space(text)
    if begin == len(text):
        raise Rejected("the file is empty", why="there is no question in it", fix="name another file")
    if text[begin] not in "{[":
        from whet.data.files.csv_files import csv_table, delimiter_of

        if delimiter := delimiter_of(text, TEXTS, path):
            read_table(csv_table(data, TEXTS, delimiter, path), collector)
            return
    document, end = parse_json(text, begin)
    rest = skip_space(text, end)
    in_lines = "\n" not in text[begin:end] and "\n" in text[end:rest]
    if rest == len(text):
        _read_document(document, collector)
    elif in_lines and _is_row(document):
        read_rows(json_lines(text), collector)
    elif in_lines and is_paragraph(document):
        read_nested(json_lines(text), collector)
    else:
        raise Rejected(
            f"{place_in(text, rest)}: the JSON ends here, but more text follows",
            got=text[rest : rest + 40],
            why="a file is one JSON document, or JSON lines with one object a line",
            fix="remove what follows, or write one object a line",
        )


def _read_document(document: Any, collector: Collector) -> None:
    if isinstance(document, list):
        return _read_data(document, collector)
    if not isinstance(document, Mapping):
        raise not_an_object(document)
    if "data" not in document:
        if _is_row(document):  # JSON lines with only one line
            return read_rows([("line 1", document)], collector)
        if is_paragraph(document):
            return read_nested([("line 1", document)], collector)
        raise _not_squad("the document has no `data`", document)
    articles = document["data"]
    if not isinstance(articles, list):
        raise _not_squad("`data` is not a list", document)
    return _read_data(articles, collector)


def _read_data(items: Sequence[Any], collector: Collector) -> None:
    first = items[0] if items else None
    if isinstance(first, Mapping) and isinstance(first.get("data"), Mapping) and "annotations" in first:
        raise Rejected(
            "this is Label Studio's JSON export",
            got=f"fields found: {', '.join(map(str, first))}",
            why="it holds the work of each annotator, and it is not known whose is right",
            fix="write one row a question: id, context, question and answers, or answer_text and answer_start",
        )
    placed = ((f"data[{n}]", one) for n, one in enumerate(items))
    if items and _is_row(items[0]):
        read_rows(placed, collector)
    else:
        read_nested(placed, collector)


def _is_row(value: Any) -> bool:
    """Return whether this is a row with one question, not one of several questions; columns may be missing."""
    return (
        isinstance(value, Mapping)
        and not {"data", "paragraphs", "qas"} & value.keys()
        and bool(_TELLING & value.keys())
    )


def _not_squad(what: str, document: Mapping[str, Any]) -> Rejected:
    return Rejected(
        f"not SQuAD: {what}",
        got=f"fields found: {', '.join(map(str, document)) or 'none'}",
        why='SQuAD is {"data": [...]}: articles with paragraphs, or rows with id, context, question and answers',
        fix="write the file so, or as JSON lines, CSV or Parquet",
    )


def read_hub(
    source: HubSource, limit: int | None = None, *, require_answers: bool = True, skip_bad: bool = False
) -> Questions:
    """Return the questions of one split, checked as `read_questions` checks a file. No code of the data set is run."""
    from whet.jobs.hub_data import load_split

    name = source.describe()
    collector = Collector(name, limit=limit, require_answers=require_answers, skip_bad=skip_bad)
    dataset = load_split(source)
    rows = len(dataset) if limit is None else min(limit, len(dataset))
    try:
        with no_cycle_search():
            read_table(dataset.with_format("arrow")[:rows], collector)
    except Rejected as problem:
        raise problem.error(name) from None
    return collector.finish()


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

    def __init__(
        self,
        source: str,
        *,
        limit: int | None,
        require_answers: bool,
        takes_answers: bool = True,
        skip_bad: bool = False,
    ) -> None:
        self.bad = BadRows(source, skip_bad=skip_bad)
        self.require_answers, self.takes_answers = require_answers, takes_answers
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
            answers = _NO_ANSWERS
            if self.takes_answers:
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
