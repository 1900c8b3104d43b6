"""Sentences in columns, as CoNLL files have them: a word a line, sentences apart by blank lines.

This module decides from all lines of a file what separates its columns, how many there are, which lines are comments,
and which first columns number the words or the sentences. Spaces of other scripts, such as U+00A0, U+3000 and U+2028,
separate nothing: they are characters of a word.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from whet.data.files.bad_rows import Rejected

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""The columns of CoNLL-U."""
ONTONOTES = ("document", "part", "number", "word", "pos", "parse", "lemma", "frameset", "sense", "speaker", "ner")
"""The first columns of CoNLL-2011 and CoNLL-2012; the number of those that follow differs between sentences."""
DOCUMENT = "-DOCSTART-"
SPACES = " \t\r\n"
"""The characters that separate columns, or stand around them."""
_PLACEHOLDERS = ["-X-", "_"]
"""The second and third column of Label Studio's CoNLL files. The tag after them may hold spaces."""
_WHOLE = re.compile(r"\d+")
_NO_WORD = re.compile(r"\d+[-.]\d+")
"""The number of a CoNLL-U line for several words together, or for an empty one."""
_KEY_AND_VALUE = re.compile(r"#\s*[\w.:-]+\s*=(\s|$)|# new(doc|par)(\s|$)")
_TEXT = re.compile(r"(?![BIESLU]-).*[a-z].*")
"""What is hardly a tag: those of entities and of parts of speech have capitals or begin with B-."""
_GLOBAL = re.compile(r"#\s*global\.columns\s*=")
"""The comment in which CoNLL-U Plus names the columns."""
Line = tuple[int, list[str]]
"""The number of a line, from 1 on, and its columns."""


@dataclass(frozen=True)
class ColumnSentence:
    """The lines of one sentence, cut into columns; each line with its number, from 1 on."""

    lines: list[Line]


@dataclass(frozen=True)
class Columns:
    """What a file in columns holds."""

    sentences: Sequence[ColumnSentence]
    names: Sequence[str] = ()
    """The names of the columns, if the form of the file says them."""
    comments: Sequence[tuple[int, str]] = ()
    """The lines that were taken for comments."""
    is_conllu: bool = False
    is_ontonotes: bool = False
    mark: str = " "
    """What stands between two columns."""


def read_columns(text: str) -> Columns:
    """Return the sentences of a text in columns; comments and -DOCSTART- lines are no words."""
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    filled = [line for _, line in lines if line.strip()]
    plain = [line for line in filled if not line.startswith(("#", DOCUMENT))] or filled
    cut = _cutter(plain)
    width = _usual(len(cut(line)) for line in plain)
    comments = _comments(lines, cut, width, [cells for cells in map(cut, plain) if cells])
    ignored = {number for number, _ in comments}
    found = list(_sentences(((number, line) for number, line in lines if number not in ignored), cut))
    is_conllu = width == len(CONLLU) and _counts_from_one(found)
    is_ontonotes = any(_is_ontonotes(line) for _, line in comments) and width > len(ONTONOTES)
    said = next((line for _, line in comments if _GLOBAL.match(line)), None)
    names = CONLLU if is_conllu else ONTONOTES if is_ontonotes else ()
    if said is not None:
        names = said.partition("=")[2].lower().split()
    mark = "\t" if cut is _by_tabs else " "
    return Columns(without_ranges(found), names, comments, is_conllu, is_ontonotes, mark)


def without_ranges(sentences: Sequence[ColumnSentence]) -> list[ColumnSentence]:
    """Return the sentences without the lines for several words together (2-3) and for empty ones (3.1).

    There are such lines only if the first column of all others holds a whole number.
    """
    firsts = [cells[0] for sentence in sentences for _, cells in sentence.lines]
    others = [first for first in firsts if not _NO_WORD.fullmatch(first)]
    if len(others) == len(firsts) or not all(map(_WHOLE.fullmatch, others)):
        return list(sentences)
    kept = ([line for line in one.lines if not _NO_WORD.fullmatch(line[1][0])] for one in sentences)
    return [ColumnSentence(lines) for lines in kept if lines]


def n_number_columns(sentences: Sequence[ColumnSentence]) -> int:
    """Return how many of the first columns hold a whole number in every line; of a single line none is known to."""
    lines = [cells for sentence in sentences for _, cells in sentence.lines]
    if len(lines) < 2:
        return 0
    width, count = min(map(len, lines)), 0
    while count < width and all(_WHOLE.fullmatch(cells[count]) for cells in lines):
        count += 1
    return count


def parted_by_numbers(sentences: Sequence[ColumnSentence]) -> list[ColumnSentence]:
    """Return the sentences of a file without blank lines, from the numbers in its first column.

    Numbers that stay the same for several words are those of the sentences; else they count the words of each.
    """
    if len(sentences) != 1:
        return list(sentences)
    lines = sentences[0].lines
    numbers = [int(cells[0]) for _, cells in lines]
    pairs = list(pairwise(numbers))
    of_sentences = any(a == b for a, b in pairs)
    ends = [n + 1 for n, (a, b) in enumerate(pairs) if (a != b if of_sentences else b <= a)]
    return [ColumnSentence(lines[a:b]) for a, b in zip([0, *ends], [*ends, len(lines)], strict=True)]


def from_brackets(values: Sequence[str]) -> list[str]:
    """Return tags (B-GPE, I-GPE, O) from entities in brackets, as CoNLL-2012 has them: `(GPE*`, `*)`, `(GPE)`, `*`."""
    tags, kind = [], ""
    for value in values:
        begins = value.startswith("(")
        kind = value.strip("(*)") if begins else kind
        tags.append(f"{'B' if begins else 'I'}-{kind}" if kind else "O")
        kind = "" if value.endswith(")") else kind
    return tags


def cell(cells: list[str], column: int, what: str, number: int, flag: str | None) -> str:
    """Return one cell of a line; raises Rejected with the line's number where it is missing or blank.

    `flag` is the option that names the column; None: there is none.
    """
    found = cells[column] if -len(cells) <= column < len(cells) else ""
    if found.strip():
        return found
    blank = f"only U+{ord(found[0]):04X}, which is no {what}" if found else "missing"
    raise Rejected(
        f"line {number}: the {what} is {blank}",
        got=" ".join(cells),
        why=f"the line has {len(cells)} columns, and it was looked for in {_name(column)}",
        fix="write it" if flag is None else f"write it, or name another column: {flag} NUMBER, counted from 0",
    )


def by_spaces(line: str) -> list[str]:
    """Return the parts of a line between its spaces and tabs."""
    return [part for part in line.strip(SPACES).replace("\t", " ").split(" ") if part]


def _by_tabs(line: str) -> list[str]:
    return [part.strip(SPACES) for part in line.split("\t")]


def _by_placeholders(line: str) -> list[str]:
    """Return the columns of a line of Label Studio, whose tag may hold spaces."""
    parts = by_spaces(line)
    return [*parts[:3], " ".join(parts[3:])] if parts[1:3] == _PLACEHOLDERS and len(parts) > 3 else parts


def _cutter(lines: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what cuts the lines of this file into columns."""
    tabbed = [line for line in lines if "\t" in line]
    if tabbed and not _mixed(tabbed, [line for line in lines if "\t" not in line]):
        n_empty = min(map(_n_empty, tabbed)) if all(line.endswith(("\t", " ")) for line in tabbed) else 0
        return (lambda line: _without_last(_by_tabs(line), n_empty)) if n_empty else _by_tabs
    return _by_placeholders if all(by_spaces(line)[1:3] == _PLACEHOLDERS for line in lines) else by_spaces


def _n_empty(line: str) -> int:
    """Return how many columns at the end of a line hold nothing."""
    cells = _by_tabs(line)
    return next((n for n, one in enumerate(reversed(cells)) if one), len(cells) - 1)


def _without_last(cells: list[str], n_empty: int) -> list[str]:
    """Return the columns without those that are empty in every line."""
    return cells[:-n_empty] if len(cells) > n_empty and not any(cells[-n_empty:]) else cells


def _mixed(tabbed: Sequence[str], spaced: Sequence[str]) -> bool:
    """Return whether spaces separate columns in some lines, and tabs in others.

    A line without a tab may also lack its tag, and its spaces be a word's: so all lines must have the same number of
    columns, and either kind of lines must end with tags that the other kind has.
    """
    widths = {len(by_spaces(line)) for line in (*tabbed, *spaced)}
    ends, others = ({by_spaces(line)[-1] for line in lines} for lines in (tabbed, spaced))
    return bool(spaced) and len(widths) == 1 and (ends <= others or others <= ends)


def _comments(
    lines: Sequence[tuple[int, str]], cut: Callable[[str], list[str]], width: int, others: Sequence[list[str]]
) -> list[tuple[int, str]]:
    """Return the lines that are comments, of a file of this many columns; `others` are the lines without a # in front.

    The word # has as many columns as other words, and a hash tag (#sail) without its tag is no comment. Above a
    sentence a comment may have as many as a word, if the file has others: then it ends with no tag of the file. So
    does one with a tab after the #, which may also be a word that lacks a column; among numbered words # is none.
    """
    last = {cells[-1] for cells in others}
    numbered = bool(others) and all(_WHOLE.fullmatch(cells[0]) or _NO_WORD.fullmatch(cells[0]) for cells in others)
    certain, uncertain = [], []
    begins = True
    for number, line in lines:
        if not line.startswith("#"):
            begins = not line.strip()
            continue
        cells = cut(line)
        said = bool(_KEY_AND_VALUE.match(line))
        above = begins and _TEXT.fullmatch(cells[-1]) is not None and cells[-1] not in last
        tabbed = above and line.startswith("#\t")
        if (
            said or (tabbed and numbered)
            if len(cells) == width
            else said or tabbed or line.startswith("# ") or width == len(CONLLU) or _is_ontonotes(line)
        ):
            certain.append((number, line))
        elif len(cells) == width and above and line.startswith("# "):
            uncertain.append((number, line))
        else:
            begins = False
    return sorted([*certain, *uncertain]) if certain else []


def _is_ontonotes(line: str) -> bool:
    return line.startswith(("#begin document", "#end document"))


def _sentences(lines: Iterator[tuple[int, str]], cut: Callable[[str], list[str]]) -> Iterator[ColumnSentence]:
    found: list[Line] = []
    for number, line in lines:
        cells = cut(line) if line.strip() else []
        if cells and cells[0] != DOCUMENT:
            found.append((number, cells))
        elif found:
            yield ColumnSentence(found)
            found = []
    if found:
        yield ColumnSentence(found)


def _counts_from_one(sentences: Sequence[ColumnSentence]) -> bool:
    """Return whether the first column of the first sentence counts its words from 1 on."""
    firsts = [cells[0] for _, cells in sentences[0].lines] if sentences else []
    numbers = [first for first in firsts if not _NO_WORD.fullmatch(first)]
    return bool(numbers) and numbers == [str(n) for n in range(1, len(numbers) + 1)]


def _usual(counts: Iterator[int]) -> int:
    """Return the most frequent number, of several the first; 0 of none."""
    return next((count for count, _ in Counter(counts).most_common(1)), 0)


def _name(column: int) -> str:
    return f"column {column}, counted from 0" if column >= 0 else "the last one"


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


def word_table(text: str, word_headings: set[str], delimiter: str | None = None) -> WordTable | None:
    """Return the words of a CSV text; None for anything else, such as columns apart by spaces.

    It is one if its header has a column for words (`word_headings`, in capitals or not), or if without a header every
    row has the same number of cells, at least two, and spaces do not part the rows. `delimiter` parts the cells; None:
    the rows say it. Without a header, tabs part columns of CoNLL.
    """
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    filled = [line for _, line in lines if line.strip()]
    if not filled:
        return None
    marks = _MARKS if delimiter is None else (delimiter,)
    for mark in marks:
        names = [name.strip(SPACES) for name in _cells(filled[0], mark)]
        if len(names) > 1 and word_headings & set(map(str.lower, names)):
            begin = next(at for at, (_, line) in enumerate(lines) if line.strip())
            return WordTable(names, mark, list(_sentences_of_csv(lines[begin + 1 :], mark, _sentence_column(names))))
    if delimiter is None and all(len(by_spaces(line)) > 1 for line in filled):
        return None
    for mark in [mark for mark in marks if mark != "\t"]:
        widths = {len(_cells(line, mark)) for line in filled}
        if max(widths) > 1 and (len(widths) == 1 or delimiter is not None):
            return WordTable([], mark, list(_sentences_of_csv(lines, mark, None)))
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


def _sentences_of_csv(lines: Sequence[tuple[int, str]], mark: str, column: int | None) -> Iterator[ColumnSentence]:
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
