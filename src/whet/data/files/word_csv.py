"""CSV with a word a row: sentences end at a blank row, or where a column that numbers them changes."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whet.data.files.conll import DOCUMENT, SPACES, ColumnSentence, by_spaces

_MARKS = (",", ";", "|", "\t")
_SENTENCE = {"sentence", "sentence #", "sentence#", "sent"} | {
    f"{first}{middle}{last}"
    for first in ("sentence", "sent")
    for middle in ("_", " ", "")
    for last in ("id", "no", "nr", "number", "idx", "index")
}


@dataclass(frozen=True)
class WordTable:
    """The columns and sentences of a CSV file with a word a row."""

    names: list[str]
    """The header; empty if the first row is a word."""
    mark: str
    sentences: list[ColumnSentence]


def word_table(text: str, word_headings: set[str]) -> WordTable | None:
    """Return the words of a CSV text; None for anything else, such as columns apart by spaces.

    It is one if its header has a column for words (`word_headings`, in capitals or not), or if without a header every
    row has the same number of cells, at least two, and spaces do not part the rows.
    """
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    filled = [line for _, line in lines if line.strip()]
    if not filled:
        return None
    for mark in _MARKS:
        names = [name.strip(SPACES) for name in _cells(filled[0], mark)]
        if len(names) > 1 and word_headings & set(map(str.lower, names)):
            begin = next(at for at, (_, line) in enumerate(lines) if line.strip())
            return WordTable(names, mark, list(_sentences(lines[begin + 1 :], mark, _sentence_column(names))))
    if all(len(by_spaces(line)) > 1 for line in filled):
        return None
    for mark in _MARKS[:-1]:
        widths = {len(_cells(line, mark)) for line in filled}
        if len(widths) == 1 and min(widths) > 1:
            return WordTable([], mark, list(_sentences(lines, mark, None)))
    return None


def _cells(line: str, mark: str) -> list[str]:
    """Return the cells of a row; none if its quotes are not closed. Tabs part cells without quotes, as in CoNLL."""
    quoting = csv.QUOTE_NONE if mark == "\t" else csv.QUOTE_MINIMAL
    try:
        return next(csv.reader([line], delimiter=mark, quoting=quoting, strict=True), [])
    except csv.Error:
        return []


def _sentence_column(names: Sequence[str]) -> int | None:
    return next((at for at, name in enumerate(names) if name.lower() in _SENTENCE), None)


def _sentences(lines: Sequence[tuple[int, str]], mark: str, column: int | None) -> Iterator[ColumnSentence]:
    """Yield the rows of each sentence; the column of its number may be filled in its first row alone."""
    rows: list[tuple[int, list[str]]] = []
    current = ""
    for number, line in lines:
        cells = [cell.strip(SPACES) for cell in _cells(line, mark)] or ([line] if line.strip() else [])
        value = cells[column] if column is not None and column < len(cells) else ""
        ends = not any(cells) or cells[0] == DOCUMENT
        if (ends or (value and value != current)) and rows:
            yield ColumnSentence(rows)
            rows = []
        current = value or current
        if not ends:
            rows.append((number, cells))
    if rows:
        yield ColumnSentence(rows)
