"""Sentences with their tags from files with a word a line: CoNLL columns, and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.data.files import conll
from whet.data.files.bad_rows import BadRows
from whet.data.files.rejected import Rejected
from whet.data.files.table import with_line_ends
from whet.data.files.word_csv import word_table
from whet.log import logger
from whet.tasks.tag.sentences import Collected, Named, Sentences

_WORD_HEADINGS = {"word", "words", "token", "tokens", "form", "text"}
_ALONE = {"word", "words", "token", "tokens"}
"""Headings of a file without another column."""
_TAG_HEADINGS = {"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "pos", "upos", "chunk", "entity"}
_LONGEST = 50
"""Words of a sentence; a file with one longer sentence, and no other, hardly is one."""


@dataclass(frozen=True)
class _Table:
    """The lines of a file, by sentence, and the names of their columns; none if no line names them."""

    sentences: Sequence[conll.ColumnSentence]
    names: Sequence[str] = ()
    mark: str = " "
    """What stands between two cells."""


def from_columns(text: str, named: Named, bad: BadRows, *, need_tags: bool, limit: int | None) -> Sentences:
    """Return the sentences of a file with a word a line; tags are the last column, unless a name or number says so."""
    table = _table_of(with_line_ends(text), named)
    _require_words(table)
    words, tags = _columns(table, named, need_tags=need_tags)
    found = Collected(bad, limit)
    for n, sentence in enumerate(table.sentences):
        if n == limit:
            break
        begin = sentence.lines[0][0]
        alone = not need_tags and named.tags is None and all(len(cells) == 1 for _, cells in sentence.lines)
        try:
            if named.tags is None:
                _require_columns(table, sentence.lines, named, at_least=2 if need_tags else 1)
            given = [conll.cell(cells, words, "word", number, named.words_flag) for number, cells in sentence.lines]
            labels = None
            if tags is not None and not alone:
                labels = [conll.cell(cells, tags, "tag", number, named.tags_flag) for number, cells in sentence.lines]
        except Rejected as problem:
            bad.add(problem, lambda begin=begin: f"the sentence that begins in line {begin}")
            continue
        found.words.append(given)
        found.tags.append(labels)
        found.places.append(f"line {begin}")
    _warn_of_one_sentence(found, bad.source)
    return found.finish(_column_name(table, tags))


def _table_of(text: str, named: Named) -> _Table:
    """Return the lines of the file: CSV if its header or all of its lines say so, else columns apart by space."""
    found = conll.sentences(text)
    first = next(found, None)
    if first is not None and first.is_conllu:
        return _Table([first, *found])
    given = {name.lower() for name in (named.words, named.tags) if name and not _is_number(name)}
    table = word_table(text, _WORD_HEADINGS | given)
    if table is not None:
        return _Table(table.sentences, table.names, table.mark)
    if first is None:
        return _Table([])
    (_, cells), *rest = first.lines
    if not _is_heading([cell.lower() for cell in cells], given):
        return _Table([first, *found])
    logger.warning("the first line names the columns and is no word: %s", " ".join(cells))
    words = [conll.ColumnSentence(rest)] if rest else []
    return _Table([*words, *found], cells)


def _is_heading(cells: Sequence[str], given: set[str]) -> bool:
    """Return whether a first line names the columns; `given` are the names that the user gave."""
    if len(cells) == 1:
        return cells[0] in _ALONE
    return (cells[0] in _WORD_HEADINGS and cells[-1] in _TAG_HEADINGS) or bool(given & set(cells))


def _columns(table: _Table, named: Named, *, need_tags: bool) -> tuple[int, int | None]:
    """Return the columns of the words and of the tags; None if there are no tags and none are needed."""
    conllu = bool(table.sentences) and table.sentences[0].is_conllu
    names = [name.lower() for name in table.names]
    usual = next((at for at, name in enumerate(names) if name in _WORD_HEADINGS), 0)
    words = _number(named.words, table, conll.CONLLU_WORD if conllu else usual, named.words_flag)
    if named.tags is not None:
        return words, _number(named.tags, table, conll.CONLLU_TAG, named.tags_flag)
    if conllu or not names:
        return words, conll.CONLLU_TAG if conllu else -1
    task = (f"{named.task}_tags", named.task)
    known = [at for at, name in enumerate(names) if name in _TAG_HEADINGS and at != words]
    found = next((names.index(name) for name in task if name in names), known[-1] if known else None)
    if found is None and need_tags:
        raise Rejected(
            "it is not known which column holds the tags",
            got=f"columns found: {', '.join(table.names)}",
            why=f"none of them has a usual name ({', '.join(sorted(_TAG_HEADINGS))})",
            fix="name it: --label_column_name NAME",
        )
    return words, found


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


def _column_name(table: _Table, tags: int | None) -> str:
    if tags is not None and table.names:
        return table.names[tags]
    return f"column {tags}" if tags is not None and tags >= 0 else "the last column"


def _require_columns(table: _Table, lines: Sequence[tuple[int, list[str]]], named: Named, at_least: int) -> None:
    """Raise Rejected for a line without a tag, and for lines of a text that is not in columns."""
    width = len(table.names) or len(lines[0][1])
    other = "the header" if table.names else "the line before"
    for number, cells in lines:
        if len(cells) < at_least:
            comma = len(cells[0].split(",")) > 1
            raise Rejected(
                f"line {number}: the tag is missing",
                got=" ".join(cells),
                why="each line has a word and its tag, separated by a space, a tab or a comma",
                fix="write the tag of every line, and words that hold a comma in quotes"
                if comma
                else "write the tag after the word",
            )
        if len(cells) != width:
            quotes = table.mark.strip() != "" and len(cells) > width
            raise Rejected(
                f"line {number} has {len(cells)} columns, and {other} {width}",
                got=table.mark.join(cells),
                why="a line holds one word with its columns; a blank line ends the sentence",
                fix=f'put a word that holds {table.mark!r} into quotes: "{table.mark}"'
                if quotes
                else f"write one word a line, or name the columns: {named.by_number(0, 1)}",
            )


def _warn_of_one_sentence(found: Collected, source: str) -> None:
    """Warn of a file whose sentences are not apart: words far from each other would be cut off or cut in windows."""
    if len(found.words) == 1 and len(found.words[0]) > _LONGEST:
        logger.warning(
            "%s is one sentence of %s words: a blank line ends a sentence; for documents without any use --doc_stride",
            source,
            f"{len(found.words[0]):,}",
        )
