"""The sentences of one split, from a file in columns or in rows, or from a data set of the hub."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from whet.console import columns_line, plural
from whet.data.files import conll
from whet.data.files.bad_rows import BadRows, Rejected, no_cycle_search
from whet.data.files.conll import word_table
from whet.data.files.csv_files import DELIMITERS, any_field_size
from whet.data.files.file_bytes import PARQUET, read_bytes, text_of
from whet.data.files.json_text import skip_space
from whet.data.files.table import TableRows, read_table, with_line_ends
from whet.errors import escape_controls
from whet.jobs.fields import file_of, limit_of
from whet.jobs.hub_data import hub_examples
from whet.log import logger
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.sentences import (
    ENTITY,
    TAGS,
    WORDS,
    Collected,
    Named,
    Sentences,
    from_rows,
    from_spans,
    span_columns,
    with_fields,
)
from whet.watch import printing

_SHOWN_WORDS = 15
_HEADER_LINES = 50
"""Lines of a CSV file among which its header and its first row are, also if a cell has several lines."""
_BRAT = re.compile(r"T\d+\t\S+ \d+ \d+(;\d+ \d+)*\t[^\n]*")


def read_split(job: TagArguments, name: str) -> Sentences:
    """Return the sentences of the split `train`, `validation` or `test`; a test split needs no tags."""
    found = _read(job, name, limit_of(job, name))
    if name == "train" and limit_of(job, name) is not None and not found.tag_order:
        every = _read(replace(job, skip_bad=True), name, None)  # the model has the tags of all, as run_ner.py says
        found = replace(found, every_tags=every.tags or ())
    found.left_out.log(name, "sentence")
    n_words = sum(map(len, found.words))
    size = f"{plural(len(found), 'sentence')}, {plural(n_words, 'word')}"
    read = {"words": found.word_column, "tags": found.tag_column if found.tags else "none"}
    printing.show_wrapped(f"{name}: {size}; {columns_line(read, found.not_read)}")
    for note in (_shown_sentence(found), *found.notes):
        printing.show_wrapped(f"{name}: {note}")
    return found


def _read(job: TagArguments, name: str, limit: int | None) -> Sentences:
    named = Named(job.text_column_name, job.label_column_name, job.task_name.lower())
    need = name != "test"
    if (file := file_of(job, name)) is not None:
        return read_file(file, named, need_tags=need, limit=limit, skip_bad=job.skip_bad)
    take = partial(_from_table, named=named, need_tags=need, limit=limit)
    return hub_examples(job, name, limit, take)


def _shown_sentence(found: Sentences) -> str:
    """Return the first sentence with a tag other than O, each word with its tag; without tags the first sentence."""
    if not found.tags:
        return f"the first sentence is {_begin(found.words[0])}"
    n = next((n for n, tags in enumerate(found.tags) if any(tag != "O" for tag in tags)), 0)
    words = [f"{word} ({tag})" for word, tag in zip(found.words[n], found.tags[n], strict=True)]
    return f"the first tagged sentence is {_begin(words)}"


def _begin(words: Sequence[str]) -> str:
    return escape_controls(" ".join(words[:_SHOWN_WORDS])) + (" ..." if len(words) > _SHOWN_WORDS else "")


def read_file(
    path: Path, named: Named, *, need_tags: bool, limit: int | None, skip_bad: bool, delimiter: str | None = None
) -> Sentences:
    """Return the sentences of a file in any format; raises DataError with everything that is wrong in it.

    `delimiter` parts the columns of CSV; None: the content says it.
    """
    bad = BadRows(str(path), skip_bad=skip_bad)
    try:
        with no_cycle_search():
            data = read_bytes(path)
            is_parquet = data.startswith(PARQUET)
            text = "{" if is_parquet else text_of(data)
            begin = skip_space(text)
            is_json = delimiter is None and begin < len(text) and text[begin] in "{[" and not _is_columns(text)
            if is_parquet or is_json:
                return _from_table(read_table(path), bad, named=named, need_tags=need_tags, limit=limit)
            if _is_csv(text, named, delimiter):
                return from_rows(read_table(path, delimiter), named, bad, need_tags=need_tags, limit=limit)
            _refuse_brat(text)
            return from_columns(text, named, bad, need_tags=need_tags, limit=limit, delimiter=delimiter)
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _from_table(rows: TableRows, bad: BadRows, *, named: Named, need_tags: bool, limit: int | None) -> Sentences:
    """Return the sentences of rows with lists of words and tags, or with texts and spans."""
    rows = with_fields(rows)
    spans = span_columns(rows, named, need_tags=need_tags)
    if spans is not None:
        spans = spans if named.takes_tags else replace(spans, spans=None)
        return from_spans(rows, spans, bad, need_tags=need_tags, limit=limit)
    return from_rows(rows, named, bad, need_tags=need_tags, limit=limit)


def _is_csv(text: str, named: Named, delimiter: str | None) -> bool:
    """Return whether a text is CSV with a sentence a row: a list of words, or as many words as tags, in its cells."""
    lines = with_line_ends(text).lstrip("\n").split("\n", _HEADER_LINES)[:_HEADER_LINES]
    for mark in DELIMITERS if delimiter is None else (delimiter,):
        try:
            with any_field_size(len(text)):
                header, first = [*csv.reader(lines, delimiter=mark), [], []][:2]
        except csv.Error:  # such as a carriage return within a line
            continue
        row = {name.strip().lower(): cell.strip() for name, cell in zip(header, first, strict=False)}
        words = next((row[name] for name in ((named.words or "").lower(), *WORDS) if name in row), "")
        tags = next((row[name] for name in ((named.tags or "").lower(), *TAGS) if name in row), "")
        given = tags.replace(",", " ").split()
        as_texts = 1 < len(given) == len(words.split()) and all(map(ENTITY.fullmatch, given))
        if (words.startswith("[") and words.endswith("]") and len(words) > 2) or as_texts:
            return True
    return False


def _refuse_brat(text: str) -> None:
    """Refuse the annotations of brat, which stand in another file than their text."""
    if (found := _BRAT.match(text.lstrip())) is not None:
        raise Rejected(
            "these are brat's standoff annotations",
            got=found[0],
            why="the words are in another file (.txt), and it is not known which annotations of a document are tags",
            fix="write columns (a word and its tag a line), or JSON lines with text and spans: "
            '{"text": "Mira sailed", "label": [[0, 4, "PER"]]}',
        )


def _is_columns(text: str) -> bool:
    """Return whether a text that begins with a bracket is a word in columns: "[ O"."""
    first = text.lstrip().split("\n", 1)[0].split()
    return len(first) > 1 and first[0] in ("[", "{") and not first[1].startswith('"') and first[1][0] not in "[{]}"


_WORD_HEADINGS = {"word", "words", "token", "tokens", "form", "text"}
_ALONE = {"word", "words", "token", "tokens"}
"""Headings of a file without another column."""
_TAG_HEADINGS = {"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "upos", "chunk", "entity"}
_CHUNKS = {"NP", "VP", "PP", "ADVP", "ADJP", "SBAR", "PRT", "CONJP", "INTJ", "LST", "UCP"}
"""Kinds of chunks (CoNLL-2000), whose tags look like those of entities."""
_LONGEST = 50
"""Words of a sentence; a file with one longer sentence, and no other, hardly is one."""
_SHOWN = 60


@dataclass(frozen=True)
class _Table:
    """The lines of a file, by sentence, and the names of their columns; none if no line names them."""

    sentences: Sequence[conll.ColumnSentence]
    names: Sequence[str] = ()
    mark: str = " "
    """What stands between two cells."""
    comments: Sequence[tuple[int, str]] = ()
    is_conllu: bool = False
    is_ontonotes: bool = False
    n_numbers: int = 0
    """How many of the first columns number the sentences or their words."""

    @cached_property
    def width(self) -> int:
        """The number of columns that most lines have, or that have names."""
        widths = Counter(len(cells) for one in self.sentences for _, cells in one.lines)
        return len(self.names) or max(widths, key=lambda width: widths[width], default=0)

    @cached_property
    def usual_line(self) -> int:
        """The number of the first line that has as many columns as most; 0 if there is none."""
        lines = (number for one in self.sentences for number, cells in one.lines if len(cells) == self.width)
        return next(lines, 0)

    def values(self, column: int) -> set[str]:
        """Return the different values of a column."""
        lines = (cells for one in self.sentences for _, cells in one.lines)
        return {cells[column] for cells in lines if column < len(cells)}

    def may_hold_entities(self, column: int) -> bool:
        """Return whether each value of the column is O, or a tag such as B-PER."""
        return all(map(ENTITY.fullmatch, self.values(column)))

    def holds_entities(self, column: int) -> bool:
        """Return whether the column holds tags of entities, at least one."""
        return self.may_hold_entities(column) and bool(self.values(column) - {"O"})


def from_columns(
    text: str, named: Named, bad: BadRows, *, need_tags: bool, limit: int | None, delimiter: str | None = None
) -> Sentences:
    """Return the sentences of a file with a word a line; tags are the last column, unless a name or number says so."""
    table = _table_of(with_line_ends(text), named, delimiter)
    _require_words(table)
    words, tags = _columns(table, named, need_tags=need_tags)
    tags = tags if named.takes_tags else None
    at_least = 1 + max(words, tags or 0) if need_tags else 1
    found = Collected(bad, limit)
    for n, sentence in enumerate(table.sentences):
        if n == limit:
            break
        begin = sentence.lines[0][0]
        width = words + 1 if named.tags is None or tags is None else tags
        alone = not need_tags and all(len(cells) <= width for _, cells in sentence.lines)
        try:
            if named.tags is None and not table.is_ontonotes:
                lines = [line for line in sentence.lines if named.takes_tags or len(line[1]) > words + 1]
                _require_columns(table, lines, named, at_least=at_least)
            given = [conll.cell(cells, words, "word", number, named.words_flag) for number, cells in sentence.lines]
            labels = None
            if tags is not None and not alone:
                labels = _tags(table, tags, sentence.lines, named, need_tags=need_tags)
        except Rejected as problem:
            bad.add(problem, lambda begin=begin: f"the sentence that begins in line {begin}")
            continue
        found.words.append(given)
        found.tags.append(labels)
        found.places.append(f"line {begin}")
    _warn_of_one_sentence(found, bad.source)
    read = found.finish(_column_name(table, tags))
    return replace(read, word_column=_column_name(table, words), notes=_notes(table, words, tags, named))


def _table_of(text: str, named: Named, delimiter: str | None) -> _Table:
    """Return the lines of the file: CSV if its header or all of its lines say so, else columns apart by space."""
    found = conll.read_columns(text)
    is_cut = delimiter in (None, found.mark)
    if found.names and is_cut:
        return _Table(
            found.sentences, found.names, found.mark, found.comments, found.is_conllu, found.is_ontonotes, n_numbers=1
        )
    given = {name.lower() for name in (named.words, named.tags) if name and not _is_number(name)}
    csv = None if delimiter == " " else word_table(text, _WORD_HEADINGS | given, delimiter)
    if csv is not None and csv.names:
        return _Table(csv.sentences, csv.names, csv.mark)
    if csv is not None:
        return _numbered(_Table(csv.sentences, (), csv.mark))
    if not is_cut:
        raise Rejected(
            f"the lines have no columns with {delimiter!r} between them",
            got=text.lstrip().split("\n", 1)[0],
            why="--csv_delimiter names what stands between a word and the columns next to it",
            fix="correct --csv_delimiter, or leave it out",
        )
    if not found.sentences:
        return _Table([])
    table = _Table(found.sentences, (), found.mark, found.comments)
    (_, cells), *rest = found.sentences[0].lines
    below = [*([conll.ColumnSentence(rest)] if rest else []), *found.sentences[1:]]
    if not _is_heading([cell.lower() for cell in cells], given) and not _names_numbers(cells, below):
        return _numbered(table)
    logger.warning("the first line names the columns and is no word: %s", " ".join(cells))
    return replace(table, sentences=conll.without_ranges(below), names=cells)


def _numbered(table: _Table) -> _Table:
    """Return the table with its first columns known as numbers, if they are, and its sentences apart by these."""
    sentences = conll.without_ranges(table.sentences)
    n_numbers = conll.n_number_columns(sentences)
    if n_numbers:
        sentences = conll.parted_by_numbers(sentences)
    return replace(table, sentences=sentences, n_numbers=n_numbers)


def _is_heading(cells: Sequence[str], given: set[str]) -> bool:
    """Return whether a first line names the columns; `given` are the names that the user gave."""
    if len(cells) == 1:
        return cells[0] in _ALONE
    return (cells[0] in _WORD_HEADINGS and cells[-1] in _TAG_HEADINGS) or bool(given & set(cells))


def _names_numbers(cells: Sequence[str], below: Sequence[conll.ColumnSentence]) -> bool:
    """Return whether a first line names the columns because the first column is a number in all lines but this one."""
    names_words = any(cell.lower() in _WORD_HEADINGS for cell in cells[1:])
    return names_words and not cells[0].isdecimal() and conll.n_number_columns(conll.without_ranges(below)) > 0


def _columns(table: _Table, named: Named, *, need_tags: bool) -> tuple[int, int | None]:
    """Return the columns of the words and of the tags, from 0 on; None if there are no tags and none are needed."""
    names = [name.lower() for name in table.names]
    usual = next((at for at, name in enumerate(names) if name in _WORD_HEADINGS), None)
    if usual is None:
        usual = min(table.n_numbers, max(table.width - 1, 0))
    words = _from_begin(_number(named.words, table, usual, named.words_flag), table)
    if named.tags is not None:
        usual_tag = names.index("upos") if table.is_conllu else -1
        if not need_tags and _lacks_tags(table, named.tags, words):
            return words, None
        return words, _from_begin(_number(named.tags, table, usual_tag, named.tags_flag), table)
    tags = _named_tags(table, named, words) if names else _last_tags(table, named, words)
    if tags is not None or not need_tags:
        return words, tags
    if names:
        raise Rejected(
            "it is not known which column holds the tags",
            got=f"columns found: {', '.join(table.names)}",
            why=f"none of them has a usual name ({', '.join(sorted(_TAG_HEADINGS))})",
            fix="name it: --label_column_name NAME",
        )
    return words, words + 1  # which no line has, or which is none: each line is named


def _lacks_tags(table: _Table, name: str, words: int) -> bool:
    """Return whether the file has no column of tags: the one that was named is missing, or the words are alone."""
    if name.lower() in map(str.lower, table.names):
        return False
    if _is_number(name):
        column = _from_begin(int(name), table)
        n_columns = max((len(cells) for one in table.sentences for _, cells in one.lines), default=0)
        return column == words or not 0 <= column < n_columns
    return bool(table.names) or table.width <= words + 1


def _named_tags(table: _Table, named: Named, words: int) -> int | None:
    """Return the column of the tags by its name; None if none is usual."""
    names = [name.lower() for name in table.names]
    known = [at for at, name in enumerate(names) if name in _TAG_HEADINGS and at != words]
    task = (f"{named.task}_tags", named.task)
    return next((names.index(name) for name in task if name in names), known[-1] if known else None)


def _last_tags(table: _Table, named: Named, words: int) -> int | None:
    """Return the column of the tags, if none has a name; None if there is none but that of the words.

    It is the last. Of numbered words with entities and then the entities within them (GermEval) it is the first of
    these, and if the last column holds no entities (the annotator's name), it is the last that does.
    """
    after = range(words + 1, table.width)
    if named.words is None and table.width > 1 and words == 0:
        _refuse_tags_first(table, named)
    if not after:
        return None
    if named.task != "ner" or not table.n_numbers:
        return after[-1]
    first = after[0]
    if len(after) > 1 and table.holds_entities(first) and all(map(table.may_hold_entities, after)):
        kinds = {tag.partition("-")[2] for tag in table.values(first)} - {""}
        return after[-1] if kinds <= _CHUNKS else first
    if table.may_hold_entities(after[-1]):
        return after[-1]
    return next((at for at in reversed(after) if table.holds_entities(at)), after[-1])


def _refuse_tags_first(table: _Table, named: Named) -> None:
    """Refuse a file whose first column holds tags of entities, and whose last one holds none."""
    last = table.width - 1
    if not table.holds_entities(0) or table.may_hold_entities(last) or named.tags_flag is None:
        return
    raise Rejected(
        "the first column holds tags, and the last one none",
        got=table.mark.join(table.sentences[0].lines[0][1]),
        why="the first column is read as the words, and the last one as their tags",
        fix=f"name the columns: {named.by_number(last, 0)}",
    )


def _from_begin(column: int, table: _Table) -> int:
    """Return the number of a column that was counted from the last one (-1), from 0 on."""
    return column + table.width if -table.width <= column < 0 else column


def _tags(
    table: _Table, column: int, lines: Sequence[conll.Line], named: Named, *, need_tags: bool
) -> list[str] | None:
    """Return the tags of a sentence; None if the file leaves them open and none are needed."""
    found = [conll.cell(cells, column, "tag", number, named.tags_flag) for number, cells in lines]
    if table.is_ontonotes and table.names[column : column + 1] == ("ner",):
        return conll.from_brackets(found)
    if not table.is_conllu or "_" not in found:
        return found
    if not need_tags:
        return None
    number, cells = lines[found.index("_")]
    raise Rejected(
        f"line {number}: the tag is missing",
        got=table.mark.join(cells),
        why=f"in CoNLL-U an underscore says that {_column_name(table, column)} is not known",
        fix="write the tag, or learn another column: --label_column_name xpos",
    )


def _notes(table: _Table, words: int, tags: int | None, named: Named) -> list[str]:
    """Return what a user should know of the lines and columns that were not read as words and tags."""
    notes = []
    if table.n_numbers and not table.names:
        notes.append(f"not read: {_column_name(table, 0)}, which numbers the lines")
    if tags is not None and named.tags is None and not table.names:
        others = [at for at in range(words + 1, table.width) if at != tags and table.holds_entities(at)]
        notes += [f"{_column_name(table, at)} holds tags too, which --label_column_name {at} takes" for at in others]
    if table.comments:
        number, line = table.comments[0]
        begins = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
        notes.append(f"not read: {plural(len(table.comments), 'comment')}, the first in line {number}: {begins}")
    return notes


def _number(name: str | None, table: _Table, usual: int, flag: str | None) -> int:
    """Return the column that a user named with this option, by its heading or its number."""
    if name is None:
        return usual
    names = [one.lower() for one in table.names]
    if name.lower() in names:
        return names.index(name.lower())
    if _is_number(name):
        return int(name)
    if names:
        raise Rejected(
            f"the column {name} is missing",
            got=f"columns found: {', '.join(table.names)}",
            why="the options name it, or the training of this model did",
            fix=f"correct {flag}",
        )
    raise Rejected(
        "the columns of this file have no names",
        got=name,
        why="its first line is a word, so they are counted from 0",
        fix=f"write a number, such as {flag} {max(usual, 0)}",
    )


def _is_number(name: str) -> bool:
    """Return whether a column is named by its number, from the end if that is negative."""
    return name.removeprefix("-").isdecimal()


def _require_words(table: _Table) -> None:
    """Refuse CSV whose rows hold a text each, and not a word."""
    names = [name.lower() for name in table.names]
    words = next((at for at, name in enumerate(names) if name in _WORD_HEADINGS), 0)
    rows = [cells for sentence in table.sentences for _, cells in sentence.lines if len(cells) > words]
    texts = [cells[words] for cells in rows if len(cells[words].split()) > 1]
    if not table.mark.strip(" ") or len(texts) * 2 <= len(rows):
        return
    raise Rejected(
        "the rows of this file hold a text each, not a word",
        got=texts[0],
        why="whet tag reads CSV with a word a row, its tag next to it, and a blank row after each sentence",
        fix="for one label a text use whet classify; for tags write a word a row",
    )


def _column_name(table: _Table, column: int | None) -> str:
    if column is None:
        return "none"
    return table.names[column] if 0 <= column < len(table.names) else f"column {column}"


def _require_columns(table: _Table, lines: Sequence[tuple[int, list[str]]], named: Named, at_least: int) -> None:
    """Raise Rejected for a line without a tag, and for lines of a text that is not in columns."""
    width = table.width
    other = f"line {table.usual_line} has" if not table.names else "CoNLL-U" if table.is_conllu else "the header"
    for number, cells in lines:
        if len(cells) < at_least:
            raise _no_tag(table, number, cells, named)
        if len(cells) != width:
            quotes = table.mark.strip() != "" and len(cells) > width
            raise Rejected(
                f"line {number} has {plural(len(cells), 'column')}, and {other} {width}",
                got=table.mark.join(cells),
                why="a line holds one word with its columns; a blank line ends the sentence",
                fix=f'put a word that holds {table.mark!r} into quotes: "{table.mark}"'
                if quotes
                else f"write one word a line, or name the columns: {named.by_number(0, 1)}",
            )


def _no_tag(table: _Table, number: int, cells: list[str], named: Named) -> Rejected:
    """Return what is wrong with a line that has a word and no tag."""
    fix = "write the tag after the word"
    why = "each line has a word and its tag, separated by a space, a tab or a comma"
    if "," in cells[0]:
        fix = "write the tag of every line, and words that hold a comma in quotes"
    elif table.n_numbers and len(cells) > 1:
        why = "the first column holds a whole number in every line, so it numbers the words"
        fix += f"; if the numbers are the words, name the columns: {named.by_number(0, 1)}"
    elif other := next((char for char in cells[0] if char.isspace() and char not in conll.SPACES), None):
        why += f"; U+{ord(other):04X}, which this line holds, is a character of a word"
        fix = "put a space or a tab between the word and its tag"
    return Rejected(f"line {number}: the tag is missing", got=" ".join(cells), why=why, fix=fix)


def _warn_of_one_sentence(found: Collected, source: str) -> None:
    """Warn of a file whose sentences are not apart: words far from each other would be cut off or cut in windows."""
    if len(found.words) == 1 and len(found.words[0]) > _LONGEST:
        logger.warning(
            "%s is one sentence of %s words: a blank line ends a sentence; for documents without any use --doc_stride",
            source,
            f"{len(found.words[0]):,}",
        )
