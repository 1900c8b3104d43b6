"""Questions from a file in any form of SQuAD-like data; the content determines the form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.data.files.bad_rows import no_cycle_search
from whet.data.files.csv_files import csv_table, delimiter_of
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import json_lines, parse_json, place_in, skip_space
from whet.data.files.parquet import parquet_columns
from whet.data.files.rejected import Rejected
from whet.tasks.qa.read.collect import Collector, not_an_object
from whet.tasks.qa.read.nested import is_paragraph, read_nested
from whet.tasks.qa.read.tables import READ, TEXTS, read_columns, read_rows, read_table
from whet.tasks.qa.types import Questions

_TELLING = {"context", "question", "answers"}


def read_questions(
    path: Path, *, limit: int | None = None, require_answers: bool = True, skip_bad: bool = False
) -> Questions:
    """Return the questions of a file, the first `limit` of them if a limit is given.

    Read are SQuAD's nested JSON (1.1 and 2.0), and its paragraphs without articles around them; one row a question,
    with the columns id, context, question, answers and perhaps title, as {"data": [...]}, a list, JSON lines, CSV (the
    answers as JSON text) or Parquet. The columns answer_text and answer_start may take the place of answers. Without
    `require_answers` the answers may be missing.
    Everything is checked before anything is returned: DataError reports the first problems, each with its place, and
    how many there are. With `skip_bad` the result holds the good questions and names the bad.
    """
    collector = Collector(str(path), limit=limit, require_answers=require_answers, skip_bad=skip_bad)
    try:
        data = read_bytes(Path(path))
        with no_cycle_search():
            if data.startswith(PARQUET):
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
    if text[begin] not in "{[" and (delimiter := delimiter_of(text, TEXTS, path)):
        read_table(csv_table(data, TEXTS, delimiter), collector)
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
