"""The rows of a table file in any format: CSV, JSON lines, JSON or Parquet, detected by the content."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whet.data.files.bad_rows import Rejected
from whet.data.files.cells import refuse_twice
from whet.data.files.csv_files import (
    DELIMITERS,
    LINE_END,
    USUAL_DELIMITERS,
    any_field_size,
    csv_records,
    quotes_are_characters,
)
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import json_lines, parse_json, place_in, skip_space
from whet.data.files.parquet import parquet_class_names, parquet_columns

_SEP = re.compile(r"sep=(?P<mark>[^\r\n])(\r\n|\r|\n)", re.IGNORECASE)
_OTHER_DELIMITER = (
    "if another character parts the columns, name it: --csv_delimiter ';'; else write the file again with Python's csv "
    "module or with pandas"
)
PlacedRow = tuple[str, Any]
"""Where a row stands (line 7), and the row: a mapping, or a `Rejected` for a row that cannot be taken apart."""


Notation = Literal["json", "csv", "arrow"]
"""csv: each cell is a text. arrow: an object within a cell has the fields of all rows, null if its own row has none."""


@dataclass(frozen=True)
class TableRows:
    """The columns of a table, and its rows."""

    columns: Sequence[str]
    """All that any row has. Of JSON, the fields of an object within a row are columns too, named by their path."""
    take: Callable[[Sequence[str]], Iterable[PlacedRow]]
    """Returns every row with at least these columns, if the table has them."""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of the classes of columns that keep them as numbers, in their order; rows have the names."""
    objects: Sequence[str] = ()
    """Columns of JSON that hold objects; if they hold nothing else, `columns` has only the paths of their fields."""
    notation: Notation = "json"

    def not_read(self, read: Collection[str]) -> list[str]:
        """Return the columns of the table other than these, and other than parts of these."""
        return [
            name for name in self.columns if name not in read and not name.startswith(tuple(f"{one}." for one in read))
        ]


def read_table(path: Path, delimiter: str | None = None) -> TableRows:
    """Return the rows of this file; raises Rejected for a file that holds no table.

    `delimiter` parts the columns of CSV; None: the character that cuts the header into most columns.
    """
    data = read_bytes(path)
    if data.startswith(PARQUET):
        return _parquet(data)
    text = text_of(data)
    begin = skip_space(text)
    if begin == len(text):
        raise Rejected("the file is empty", why="there is no row in it", fix="name another file")
    if text[begin] in "{[" and delimiter is None:
        return _json(text, begin)
    text = with_line_ends(text)
    if said := _SEP.match(text):  # what spreadsheets write above the header; its line stays, empty
        text = "\n" + text[said.end() :]
        delimiter, begin = delimiter or said["mark"], 1
    return _csv(text, delimiter or _delimiter_of(text[begin:], path), path)


def with_line_ends(text: str) -> str:
    """Return the text with line feeds, if carriage returns alone end its lines, as in files of old spreadsheets."""
    return text.replace("\r", "\n") if "\r" in text and "\n" not in text else text


def _parquet(data: bytes) -> TableRows:
    columns, classes = list(parquet_columns(data, ())), parquet_class_names(data)

    def take(names: Sequence[str]) -> Iterator[PlacedRow]:
        found = parquet_columns(data, names)
        wanted = [name for name in found if name in names]
        values_of = [named_classes(found[name], classes.get(name, ())) for name in wanted]
        for n, values in enumerate(zip(*values_of, strict=True)):
            yield f"row {n}", dict(zip(wanted, values, strict=True))

    return TableRows(columns, take, classes, notation="arrow")


def named_classes(values: list[Any], names: Sequence[str]) -> list[Any]:
    """Return the names of classes for their numbers, also within lists, None for any other number; or what was given.

    Without names the values stay as they are.
    """

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(one) for one in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return [name(value) for value in values] if names else values


def _json(text: str, begin: int) -> TableRows:
    document, end = parse_json(text, begin)
    rest = skip_space(text, end)
    if rest == len(text):
        rows = _rows_of_document(document)
    elif "\n" not in text[begin:end] and "\n" in text[end:rest]:
        rows = list(json_lines(text))
    else:
        raise Rejected(
            f"{place_in(text, rest)}: the JSON ends here, but more text follows",
            got=text[rest : rest + 40],
            why="a file is one JSON document, or JSON lines with one object a line",
            fix="remove what follows, or write one object a line",
        )
    columns, objects = _columns_of(rows)
    if objects:
        rows = [(place, _with_paths(row)) for place, row in rows]
        _refuse_label_studio(rows[0][1])
    return TableRows(columns, lambda _: rows, objects=objects)


def _columns_of(rows: Sequence[PlacedRow]) -> tuple[list[str], list[str]]:
    """Return all columns that any row has, objects by the paths of their fields, and the columns that hold objects."""
    columns: dict[str, dict[str, None]] = {}
    """Name -> the columns that it stands for: itself, unless all of its values are objects."""
    objects: dict[str, None] = {}
    for _, row in rows:
        if type(row) is not dict:
            continue
        for name, value in row.items():
            if type(value) is dict:
                objects[name] = None
                paths = [path for path, inner in _with_paths({name: value}).items() if type(inner) is not dict]
                columns.setdefault(name, {}).update(dict.fromkeys(paths))
            elif value is not None or name not in objects:
                columns.setdefault(name, {})[name] = None
    return list({path: None for paths in columns.values() for path in paths}), list(objects)


def _refuse_label_studio(row: Any) -> None:
    if isinstance(row, Mapping) and isinstance(row.get("data"), Mapping) and isinstance(row.get("annotations"), list):
        raise Rejected(
            "this is Label Studio's JSON export",
            got=f"fields found: {', '.join(map(str, row))}",
            why="it holds the work of each annotator, and it is not known whose is right",
            fix="export the project as JSON-MIN or as CSV, and for tags of words as CONLL2003",
        )


def _with_paths(row: Any) -> Any:
    """Return a row in which the fields of an object within it are columns too, named by their path: meta.label."""
    if not isinstance(row, Mapping):
        return row
    found = dict(row)
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{path}": inner for path, inner in _with_paths(value).items()}
    return found


_LISTS = ("data", "rows", "examples", "instances", "train", "validation", "valid", "val", "dev", "eval", "test")
"""Names under which a document holds its rows; the first one holds them next to anything else."""


def _rows_of_document(document: Any) -> list[PlacedRow]:
    """Return the rows of a JSON document: a list, an object whose list has one of the usual names, or one row."""
    if isinstance(document, Mapping):
        held = [name for name in _LISTS if _are_rows(document.get(name))]
        others = [value for name, value in document.items() if name not in held]
        if isinstance(document.get("data"), list):
            held = ["data"]
        elif not held or any(isinstance(one, list) or (isinstance(one, str) and " " in one) for one in others):
            return [("line 1", document)]  # JSON lines with only one line
        if len(held) > 1:
            raise Rejected(
                "the file holds several lists of rows",
                got=held,
                why="it is not known which of them is meant: an option names one file for each split",
                fix="write each list into a file of its own",
            )
        document = document[held[0]]
    return [(f"entry {n}", row) for n, row in enumerate(document)]


def _are_rows(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(one, Mapping) for one in found)


def _delimiter_of(text: str, path: Path) -> str:
    header = LINE_END.split(text, maxsplit=1)[0]
    with any_field_size(len(header)):
        counts = {mark: _n_columns(header, mark) for mark in DELIMITERS}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] > 1 else USUAL_DELIMITERS.get(path.suffix.lower(), ",")


def _n_columns(header: str, mark: str) -> int:
    try:
        return len(next(csv.reader([header], delimiter=mark), []))
    except csv.Error:
        return 0


def _csv(text: str, delimiter: str, path: Path) -> TableRows:
    quotes = delimiter != "\t" or not quotes_are_characters(text, path)
    rows = list(csv_records(text, delimiter, fix=_OTHER_DELIMITER, quotes=quotes))
    if not rows:
        raise Rejected("the file has no header", why="there is no row in it", fix="name another file")
    columns = [name.strip() for name in rows[0][1]]
    n_columns = len(columns) - _n_empty_at_the_end(rows)
    rows = [(line, cells[:n_columns] if len(cells) == len(columns) else cells) for line, cells in rows]
    columns = columns[:n_columns]
    refuse_twice(columns)

    def take(_: Sequence[str]) -> Iterator[PlacedRow]:
        for line, cells in rows[1:]:
            if len(cells) == len(columns):
                yield f"line {line}", dict(zip(columns, cells, strict=True))
            else:
                yield f"line {line}", _other_columns(cells, columns, delimiter)

    return TableRows(columns, take, notation="csv")


def _n_empty_at_the_end(rows: Sequence[tuple[int, list[str]]]) -> int:
    """Return how many columns at the end have neither a name nor a value: spreadsheets leave them behind."""
    width, count = len(rows[0][1]), 0
    while count < width - 1 and not any(cells[width - 1 - count].strip() for _, cells in rows if len(cells) == width):
        count += 1
    return count


def _other_columns(cells: Sequence[str], columns: Sequence[str], delimiter: str) -> Rejected:
    return Rejected(
        f"the row has {len(cells)} column{'' if len(cells) == 1 else 's'}, and the header {len(columns)}",
        got=delimiter.join(cells),
        why="every row has the columns of the header",
        fix=f'put a text that holds {delimiter!r} or a line break into quotes: "..."',
    )
