"""Sentences with their tags, from rows with lists of words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whet.data.files.bad_rows import BadRows
from whet.data.files.cells import list_of_cell
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, object_of, text_field
from whet.data.files.table import TableRows
from whet.jobs.left_out import LeftOut

ENTITY = re.compile(r"O|[BIESLU]-.+")
"""A tag that marks an entity, or none."""
IGNORED = -100
"""The label that losses leave out."""
_EXAMPLE = '{"tokens": ["..."], "tags": ["..."]}'
"""What a row looks like, for messages."""

WORDS = ("tokens", "words", "text", "sentence")
TAGS = ("ner_tags", "pos_tags", "upos", "tags", "labels", "label", "word_labels")


@dataclass(frozen=True)
class Named:
    """The columns that a user named; None: the data decides."""

    words: str | None = None
    tags: str | None = None
    task: str = "ner"
    words_flag: str = "--text_column_name"
    """The option that names the column of the words."""
    tags_flag: str | None = "--label_column_name"
    """The option that names the column of the tags; None: the command has none."""

    def by_number(self, words: int, tags: int) -> str:
        """Return how these columns are named by their numbers."""
        own = f"{self.words_flag} {words}"
        return own if self.tags_flag is None else f"{own} {self.tags_flag} {tags}"


@dataclass(frozen=True)
class Sentences:
    """Words and their tags, with the place of each sentence."""

    source: str
    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]] | None
    """None: no sentence has tags."""
    places: Sequence[str]
    tag_column: str
    left_out: LeftOut = field(default_factory=LeftOut)
    tag_order: Sequence[str] = field(default=())
    """The tags in the order of the data set, if that names them."""
    word_column: str = "words"
    not_read: Sequence[str] = ()
    """The other columns of the data, if they have names."""
    notes: Sequence[str] = ()
    """What else a user should know of how the data was read."""

    def __len__(self) -> int:
        return len(self.words)


class Collected:
    """Gathers sentences; a sentence that breaks a rule goes to the bad rows."""

    def __init__(self, bad: BadRows, limit: int | None) -> None:
        self.bad, self.limit = bad, limit
        self.words: list[list[str]] = []
        self.tags: list[list[str] | None] = []
        self.places: list[str] = []

    def finish(self, tag_column: str) -> Sentences:
        self.bad.refuse(len(self.words), "sentence")
        tags = [one or [] for one in self.tags] if all(one is not None for one in self.tags) else None
        return Sentences(
            source=self.bad.source,
            words=self.words,
            tags=tags,
            places=self.places,
            tag_column=tag_column,
            left_out=LeftOut.of(self.bad),
        )


def from_rows(rows: TableRows, named: Named, bad: BadRows, *, need_tags: bool, limit: int | None) -> Sentences:
    """Return the sentences of a table whose rows hold lists of words and of tags."""
    words = _column(rows.columns, named.words, WORDS, "words", named.words_flag)
    usual = (f"{named.task}_tags", named.task, *TAGS)
    tags = next((name for name in usual if name in rows.columns), None)
    if named.tags or (need_tags and tags is None):
        tags = _column(rows.columns, named.tags, usual, "tags", "--label_column_name") if need_tags else named.tags
    found = Collected(bad, limit)
    for n, (place, row) in enumerate(rows.take([words, *([tags] if tags else [])])):
        if n == limit:
            break
        try:
            row = _with_lists(row, words, tags)
            given = _words(row, words)
            labels = _tags(row, tags, len(given), needed=need_tags) if tags else None
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        found.words.append(given)
        found.tags.append(labels)
        found.places.append(place)
    read, not_read = found.finish(tags or "tags"), rows.not_read([words, *([tags] if tags else [])])
    order = rows.class_names.get(tags or "", ())
    return replace(read, word_column=words, tag_order=order, not_read=not_read)


def _column(found: Sequence[str], name: str | None, usual: Sequence[str], what: str, flag: str) -> str:
    chosen = name or next((one for one in usual if one in found), None)
    if chosen is not None and chosen in found:
        return chosen
    raise Rejected(
        f"the column {name} is missing" if name else f"it is not known which column holds the {what}",
        got=f"columns found: {', '.join(map(str, found)) or 'none'}",
        why=f"the {what} of a sentence are a list in one column ({', '.join(usual)})",
        fix=f"name it: {flag} NAME",
    )


def _with_lists(row: Any, words: str, tags: str | None) -> Any:
    """Return the row with lists in place of two texts with as many parts: words and tags, apart by spaces or commas."""
    if not isinstance(row, Mapping) or tags is None:
        return row
    text, said = row.get(words), row.get(tags)
    if not (isinstance(text, str) and isinstance(said, str)) or text.lstrip().startswith("["):
        return row
    parts = [part for part in text.split(" ") if part]
    given = [part for part in said.replace(",", " ").split(" ") if part]
    fits = len(parts) == len(given) and all(map(ENTITY.fullmatch, given))  # not a text and the name of its class
    return {**row, words: parts, tags: given} if fits else row


def _list(row: Any, name: str, what: str) -> list[Any]:
    value = object_of(row, _EXAMPLE).get(name)
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of CSV
        value = list_of_cell(value) or value
    if isinstance(value, list):
        return value
    raise Rejected(
        f"{name} is missing" if value is None else f"{name} is {kind(value)}, not a list",
        got=value if value is not None else sorted(map(str, row)),
        why=f"the {what} of a sentence are a list",
        fix=f'write {name} as a list: ["...", "..."]',
    )


def _words(row: Any, name: str) -> list[str]:
    given = _list(row, name, "words")
    if not given:
        raise Rejected(f"{name} is empty", got=given, why="a sentence has words", fix="fill it, or remove the row")
    return [text_field({f"{name}[{n}]": word}, f"{name}[{n}]") for n, word in enumerate(given)]


def _tags(row: Any, name: str, n_words: int, *, needed: bool) -> list[str] | None:
    if not needed and row.get(name) is None:
        return None
    tags = _list(row, name, "tags")
    if len(tags) != n_words:
        raise Rejected(
            f"{name} has {len(tags)} tags for {n_words} words",
            got=tags,
            why="each word has one tag",
            fix=f"correct {name} or the words",
        )
    for n, tag in enumerate(tags):
        if tag == IGNORED:
            raise Rejected(
                f"{name}[{n}] is {IGNORED}, which is no tag",
                got=tags,
                why="elsewhere this number keeps a word out of the loss; whet tag learns a tag for each word",
                fix="give the word a tag, such as O, or leave the sentence out: --skip_bad",
            )
        if tag is None or tag == "" or isinstance(tag, list | dict):
            raise Rejected(
                f"{name}[{n}] is {'empty' if tag == '' else kind(tag)}",
                got=tag,
                why="a tag is a text or a number",
                fix=f"write {name}[{n}] as a text, O for a word outside of every entity",
            )
    return [str(tag) for tag in tags]
