"""One row per question: flat JSON, JSON lines, and tables from CSV or Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whet.data.files.cells import column_values, refuse_twice
from whet.data.files.rejected import Rejected
from whet.tasks.qa.read.collect import Collector

if TYPE_CHECKING:
    import pyarrow

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
            check_columns(list(row), require_answers=collector.require_answers)
        collector.add_row(_with_answers(row), partial(_row_place, place, row))


def read_table(table: pyarrow.Table, collector: Collector) -> None:
    """Pass every row of an Arrow table to the collector."""
    refuse_twice(table.column_names)
    collector.see(dict.fromkeys(table.column_names))
    check_columns(table.column_names, require_answers=collector.require_answers)
    wanted = [name for name in READ if name in table.column_names]
    read_columns({name: column_values(table.column(name)) for name in wanted}, collector)


def read_columns(columns: Mapping[str, Sequence[Any]], collector: Collector) -> None:
    """Pass every row of these columns to the collector."""
    check_columns(list(columns), require_answers=collector.require_answers)
    collector.see(columns)
    wanted = [name for name in READ if name in columns]
    rows = (dict(zip(wanted, row, strict=True)) for row in zip(*(columns[name] for name in wanted), strict=True))
    read_rows(((f"row {n}", row) for n, row in enumerate(rows)), collector)


def check_columns(found: Sequence[str], *, require_answers: bool) -> None:
    """Refuse rows with other columns than those of SQuAD."""
    apart = "answers" not in found and any(name in found for name in ANSWER_COLUMNS)
    answers = ANSWER_COLUMNS if apart else ("answers",)
    said = require_answers and "is_impossible" not in found  # an impossible question needs no answers
    needed = ["id", "context", "question", *(answers if said else ())]
    missing = [name for name in needed if name not in found]
    if "answers" in found and any(name in found for name in ANSWER_COLUMNS):
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
    """Return the row with `answers`, made from answer_text and answer_start if it has these instead."""
    if not isinstance(row, Mapping) or "answers" in row or not any(name in row for name in ANSWER_COLUMNS):
        return row
    text, start = (row.get(name) for name in ANSWER_COLUMNS)
    if isinstance(text, list):
        return {**row, "answers": {"text": text, "answer_start": start}}
    none = text in (None, "") and (start in (None, "", -1, "-1") or start != start)  # NaN: a missing value of pandas
    return {**row, "answers": [] if none else [{"text": text, "answer_start": start}]}


def _row_place(place: str, row: Any) -> str:
    name = row.get("id") if isinstance(row, Mapping) else None
    return f"{place}, question {str(name)[:80]!r}" if isinstance(name, str | int) and name != "" else place
