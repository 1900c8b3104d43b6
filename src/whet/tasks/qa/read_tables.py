"""One row a question: flat JSON, JSON lines, CSV and Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whet.tasks.qa.collect import Collector
from whet.tasks.qa.rejected import Rejected
from whet.tasks.qa.strict_json import parse_json, skip_space

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("id", "title", "context", "question", "answers")
_READ = (*COLUMNS, "is_impossible")


def read_rows(rows: Iterable[tuple[str, Any]], collector: Collector) -> None:
    """Hand every (place, row) to the collector; the columns of the first row have to be there at all."""
    for n, (place, row) in enumerate(rows):
        if collector.full:
            return
        if n == 0 and isinstance(row, Mapping):
            check_columns(list(row), require_answers=collector.require_answers)
        collector.add_row(row, partial(_row_place, place, row))


def read_table(table: pyarrow.Table, collector: Collector) -> None:
    """Hand every row of an Arrow table to the collector."""
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Rejected(
            "columns have the same name", got=twice, why="it is not known which one is meant", fix="keep one of each"
        )
    check_columns(names, require_answers=collector.require_answers)
    wanted = [name for name in _READ if name in names]
    columns = [table.column(name).to_pylist() for name in wanted]
    rows = (dict(zip(wanted, values, strict=True)) for values in zip(*columns, strict=True))
    read_rows(((f"row {n}", row) for n, row in enumerate(rows)), collector)


def check_columns(found: Sequence[str], *, require_answers: bool) -> None:
    """Refuse rows of other columns than those of SQuAD."""
    needed = [name for name in COLUMNS if name != "title" and (require_answers or name != "answers")]
    missing = [name for name in needed if name not in found]
    if missing:
        raise Rejected(
            f"the columns {', '.join(missing)} are missing"
            if len(missing) > 1
            else f"the column {missing[0]} is missing",
            got=f"columns found: {', '.join(map(str, found)) or 'none'}",
            why=f"a question needs {', '.join(needed)}, under these names; title may be left out",
            fix="rename your columns to these names",
        )


def json_lines(text: str) -> Iterator[tuple[str, Any]]:
    """Yield every line's place and value; raise Rejected at the first line that is not JSON."""
    for n, line in enumerate(text.split("\n"), start=1):
        begin = skip_space(line)
        if begin == len(line):
            continue
        try:
            row, end = parse_json(line, begin)
        except Rejected as problem:
            problem.what = f"line {n} of the JSON lines: {problem.what.removeprefix('line 1, ')}"
            raise
        if skip_space(line, end) != len(line):
            raise Rejected(
                f"line {n} holds more than one JSON value",
                got=line[end : end + 40],
                why="in JSON lines each line is one question",
                fix="write one object a line, or one JSON document in all",
            )
        yield f"line {n}", row


def csv_table(data: bytes) -> pyarrow.Table:
    """Return the CSV text (UTF-8) as an Arrow table whose known columns are texts."""
    from pyarrow import ArrowInvalid, csv, string

    try:
        return csv.read_csv(
            io.BytesIO(data),
            # one block holds everything: a quoted context may run over any number of lines
            read_options=csv.ReadOptions(block_size=len(data) + 1),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(COLUMNS, string())),
        )
    except ArrowInvalid as error:
        raise Rejected(
            "not a CSV table",
            got=str(error),
            why="every row has the columns of the header, and quotes inside a quoted text are doubled",
            fix="write the file again with Python's csv module or with pandas",
        ) from None


def parquet_table(data: bytes) -> pyarrow.Table:
    """Return the Parquet file as an Arrow table."""
    from pyarrow import ArrowException, BufferReader, parquet

    try:
        return parquet.read_table(BufferReader(data))
    except (ArrowException, OSError) as error:
        raise Rejected(
            "the Parquet file cannot be read",
            got=str(error),
            why="it is damaged or cut off",
            fix="write or copy it again",
        ) from None


def _row_place(place: str, row: Any) -> str:
    name = row.get("id") if isinstance(row, Mapping) else None
    return f"{place}, question {name[:80]!r}" if isinstance(name, str) and name else place
