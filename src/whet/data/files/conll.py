"""Sentences in columns, as CoNLL files have them: a word a line, sentences apart by blank lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from whet.data.files.rejected import Rejected

_CONLLU_COLUMNS = 10
CONLLU_WORD, CONLLU_TAG = 1, 3
"""Columns of CoNLL-U: the form of a word, and its part of speech."""
_NO_WORD = re.compile(r"\d+[-.]\d+")
"""The number of a CoNLL-U line for several words together, or for an empty one."""
DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True)
class ColumnSentence:
    """The lines of one sentence, cut into columns; each line with its number, from 1 on."""

    lines: list[tuple[int, list[str]]]

    @property
    def is_conllu(self) -> bool:
        """Whether these are lines of CoNLL-U: ten columns, the first of which counts the words from 1 on."""
        numbers = [str(n) for n in range(1, len(self.lines) + 1)]
        return numbers == [cells[0] for _, cells in self.lines if len(cells) == _CONLLU_COLUMNS]


def sentences(text: str) -> Iterator[ColumnSentence]:
    """Yield the sentences of a text in columns; comments and -DOCSTART- lines are no words."""
    mark = "\t" if "\t" in text else None
    lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            if lines:
                yield ColumnSentence(lines)
            lines = []
            continue
        cells = [cell.strip() for cell in line.split(mark)]
        if cells[0] == DOCUMENT or (line.startswith("# ") and "=" in line and len(cells) != _CONLLU_COLUMNS):
            continue
        if len(cells) == _CONLLU_COLUMNS and _NO_WORD.fullmatch(cells[0]):
            continue
        lines.append((number, cells))
    if lines:
        yield ColumnSentence(lines)


def cell(cells: list[str], column: int, what: str, number: int, flag: str | None) -> str:
    """Return one cell of a line; raises Rejected with the line's number where it is missing or empty.

    `flag` is the option that names the column; None: there is none.
    """
    if -len(cells) <= column < len(cells) and cells[column]:
        return cells[column]
    raise Rejected(
        f"line {number}: the {what} is missing",
        got=" ".join(cells),
        why=f"the line has {len(cells)} columns, and it was looked for in {_name(column)}",
        fix="write it" if flag is None else f"write it, or name another column: {flag} NUMBER, counted from 0",
    )


def _name(column: int) -> str:
    return f"column {column}, counted from 0" if column >= 0 else "the last one"
