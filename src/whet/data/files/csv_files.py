"""Tables in text: CSV with the delimiter of its header."""

from __future__ import annotations

import csv as standard_csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.files.bad_rows import Rejected
from whet.log import logger

if TYPE_CHECKING:
    import pyarrow

DELIMITERS = (",", ";", "\t", "|")
USUAL_DELIMITERS = {".csv": ",", ".tsv": "\t"}
LINE_END = re.compile(r"\r\n|\r|\n")
_HEADER_CHARS = 10_000
_MOST_COLUMNS = 2_000
_QUOTED = r'"(?:[^"]+|"")*+"'
_AS_WRITTEN = re.compile(rf'(?:(?:{_QUOTED}|[^"\t\r\n]*+)(?:\t|\r\n|\r|\n|\Z))*+')
"""A table with tabs as programs write CSV: quotes stand around a cell, and those within it are doubled."""
_OPENING = re.compile(r'(?:\A|[\t\r\n])"')
_CELL = re.compile(rf'(?P<quoted>{_QUOTED})|[^"\t\r\n]++')
_AGAIN = "write the file again with Python's csv module or with pandas"


def delimiter_of(text: str, known: Sequence[str], path: Path) -> str | None:
    """Return the delimiter of the columns; None if the text is not a table of the known columns.

    It is the one that splits the first line into most of the known names. A file whose name ends with .csv or .tsv is
    always a table.
    """
    header = io.StringIO(text[:_HEADER_CHARS].lstrip(), newline=None).readline()  # splitlines also cuts at U+2028 ...
    counts = {mark: len(set(known) & set(_cut(header, mark))) for mark in DELIMITERS}
    best = max(counts, key=lambda mark: counts[mark], default=",")
    return best if counts.get(best) else USUAL_DELIMITERS.get(path.suffix.lower())


def csv_table(data: bytes, texts: Sequence[str], delimiter: str, path: Path) -> pyarrow.Table:
    """Return the CSV text (UTF-8) as an Arrow table; these columns are texts, even if they look like numbers."""
    from pyarrow import ArrowInvalid, csv, string

    header = data[:_HEADER_CHARS].split(b"\n", 1)[0]
    if header.count(delimiter.encode()) > _MOST_COLUMNS:
        raise _no_table(f"{header.count(delimiter.encode()):,} columns", delimiter)
    quotes: str | bool = '"'
    if delimiter == "\t" and b'"' in data:
        text = data.decode()
        if quotes_are_characters(text, path):
            quotes = False
        else:
            for _ in csv_records(text, delimiter, fix=_AGAIN):  # refuses rows that a quote joins
                pass
    try:
        return csv.read_csv(
            io.BytesIO(data),
            # one block for everything, as a quoted text may have any number of lines; one thread, to count rows
            read_options=csv.ReadOptions(block_size=len(data) + 1, use_threads=False),
            parse_options=csv.ParseOptions(delimiter=delimiter, quote_char=quotes, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, string())),
        )
    except ArrowInvalid as error:
        raise _no_table(str(error).removeprefix("CSV parse error: "), delimiter) from None


def csv_records(text: str, delimiter: str, *, fix: str, quotes: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the line that it begins in, counted from 1; a quoted text may run over many lines.

    A line of spaces is none, unless the table has one column. With tabs, a quote that joins two complete rows is
    refused, unless the quotes show that a program has written the file as CSV. Without `quotes` they are characters.
    """
    quoting = standard_csv.QUOTE_MINIMAL if quotes else standard_csv.QUOTE_NONE
    reader = standard_csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    lines = LINE_END.split(text) if delimiter == "\t" and quotes and _OPENING.search(text) is not None else []
    if lines and not _are_rows(lines) and _doubles_quotes(text):
        lines = []
    begin, width = 1, 0
    with any_field_size(len(text)):
        try:
            for cells in reader:
                if len(cells) > 1 or any(map(str.strip, cells)) or (cells and width == 1):
                    width = width or len(cells)
                    if lines and width > 1 and begin < reader.line_num:
                        _refuse_joined(lines, begin, reader.line_num, width)
                    yield begin, cells
                begin = reader.line_num + 1
        except standard_csv.Error as error:
            raise Rejected(
                f"line {max(reader.line_num, begin)}: not a CSV table with {delimiter!r} between its columns",
                got=f"{error} (the row begins in line {begin})",
                why="quotes inside a quoted text are doubled, and every quoted text ends",
                fix=fix,
            ) from None


def _refuse_joined(lines: Sequence[str], begin: int, end: int, width: int) -> None:
    """Refuse a row that a quote joins of two lines which have all columns each."""
    if any(lines[at - 1].count("\t") != width - 1 for at in (begin, end)):
        return
    raise Rejected(
        f"line {begin}: a quote joins it with line {end}",
        got=f"{lines[begin - 1]} ... {lines[end - 1]}",
        why="they are rows of their own if quotes are characters of the texts, and one row if they are those of CSV",
        fix=f"write the file as JSON lines; or, if quotes are characters, {_AGAIN}, which double them",
    )


def quotes_are_characters(text: str, path: Path) -> bool:
    """Return whether the quotes in a table with tabs are characters of its texts, as in GLUE's files, and not CSV's.

    They are if each line has the columns of the header, and no program that writes CSV leaves quotes as these are.
    """
    if _OPENING.search(text) is None or not _are_rows(LINE_END.split(text)):
        return False
    if _AS_WRITTEN.fullmatch(text) is None:
        logger.warning(
            "%s: quotes are read as characters of its texts: each line is a row, and CSV would double the quotes", path
        )
        return True
    if any(cell["quoted"] and '""' not in cell["quoted"][1:-1] for cell in _CELL.finditer(text)):
        logger.warning("%s: quotes around a cell are read as those of CSV, and not as characters of its text", path)
    return False


def _are_rows(lines: Sequence[str]) -> bool:
    """Return whether each line has the columns of the header, and this has no quotes."""
    header, *others = [line for line in lines if line.strip()]
    return '"' not in header and all(line.count("\t") == header.count("\t") for line in others)


def _doubles_quotes(text: str) -> bool:
    """Return whether a program has written this table with tabs as CSV, for all quotes are so, and some are doubled."""
    inside = (cell["quoted"][1:-1] for cell in _CELL.finditer(text) if cell["quoted"])
    return any('""' in one for one in inside) and _AS_WRITTEN.fullmatch(text) is not None


@contextmanager
def any_field_size(n_chars: int) -> Iterator[None]:
    """Let one cell hold a text of any length; the limit of the csv module holds for the process."""
    before = standard_csv.field_size_limit(n_chars + 1)
    try:
        yield
    finally:
        standard_csv.field_size_limit(before)


def _no_table(got: str, delimiter: str) -> Rejected:
    return Rejected(
        f"not a CSV table with {delimiter!r} between its columns",
        got=got,
        why="every row has the columns of the header, and quotes inside a quoted text are doubled",
        fix=_AGAIN,
    )


def _cut(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(standard_csv.reader([line], delimiter=delimiter), [])]
    except standard_csv.Error:
        return []
