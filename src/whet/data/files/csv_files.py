"""Tables in text: CSV with the delimiter of its header."""

from __future__ import annotations

import csv as standard_csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.files.bad_rows import Rejected

if TYPE_CHECKING:
    import pyarrow

DELIMITERS = (",", ";", "\t", "|")
USUAL_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_HEADER_CHARS = 10_000
_MOST_COLUMNS = 2_000


def delimiter_of(text: str, known: Sequence[str], path: Path) -> str | None:
    """Return the delimiter of the columns; None if the text is not a table of the known columns.

    It is the one that splits the first line into most of the known names. A file whose name ends with .csv or .tsv is
    always a table.
    """
    header = io.StringIO(text[:_HEADER_CHARS].lstrip(), newline=None).readline()  # splitlines also cuts at U+2028 ...
    counts = {mark: len(set(known) & set(_cut(header, mark))) for mark in DELIMITERS}
    best = max(counts, key=lambda mark: counts[mark], default=",")
    return best if counts.get(best) else USUAL_DELIMITERS.get(path.suffix.lower())


def csv_table(data: bytes, texts: Sequence[str], delimiter: str) -> pyarrow.Table:
    """Return the CSV text (UTF-8) as an Arrow table; these columns are texts, even if they look like numbers."""
    from pyarrow import ArrowInvalid, csv, string

    header = data[:_HEADER_CHARS].split(b"\n", 1)[0]
    if header.count(delimiter.encode()) > _MOST_COLUMNS:
        raise _no_table(f"{header.count(delimiter.encode()):,} columns", delimiter)
    try:
        return csv.read_csv(
            io.BytesIO(data),
            # one block for everything, as a quoted text may have any number of lines; one thread, to count rows
            read_options=csv.ReadOptions(block_size=len(data) + 1, use_threads=False),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, string())),
        )
    except ArrowInvalid as error:
        raise _no_table(str(error).removeprefix("CSV parse error: "), delimiter) from None


def _no_table(got: str, delimiter: str) -> Rejected:
    return Rejected(
        f"not a CSV table with {delimiter!r} between its columns",
        got=got,
        why="every row has the columns of the header, and quotes inside a quoted text are doubled",
        fix="write the file again with Python's csv module or with pandas",
    )


def _cut(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(standard_csv.reader([line], delimiter=delimiter), [])]
    except standard_csv.Error:
        return []
