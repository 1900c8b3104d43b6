"""Sentences with their tags, from rows with lists of words, or with texts and the spans of their entities."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whet.console import plural
from whet.data.files.bad_rows import BadRows, Rejected
from whet.data.files.cells import list_of_cell
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

    @property
    def takes_tags(self) -> bool:
        """Whether tags are read, if there are some."""
        return self.tags_flag is not None

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
    every_tags: Sequence[Sequence[str]] = ()
    """The tags of all sentences of the data, where these are only some of them."""
    notes: Sequence[str] = ()
    """What else a user should know of how the data was read."""
    some_tags: Sequence[Sequence[str] | None] = ()
    """The tags of each sentence that has some, where others have none."""

    def __len__(self) -> int:
        return len(self.words)

    def tags_of(self, sentence: int) -> Sequence[str] | None:
        """Return the tags of this sentence; None if it has none."""
        given = self.tags or self.some_tags
        return given[sentence] if given else None


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
            some_tags=self.tags if tags is None else (),
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
            row = _with_lists(row, words, tags, has_to_fit=named.takes_tags)
            given = _words(row, words)
            labels = _tags(row, tags, len(given), needed=need_tags) if tags and named.takes_tags else None
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        found.words.append(given)
        found.tags.append(labels)
        found.places.append(place)
    read = found.finish(tags or "tags")
    not_read = rows.not_read([words, *([tags] if tags and named.takes_tags else [])])
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


def _with_lists(row: Any, words: str, tags: str | None, *, has_to_fit: bool = True) -> Any:
    """Return the row with lists in place of two texts with as many parts: words and tags, apart by spaces or commas.

    Where tags are not read, they need not fit: the words are apart by spaces all the same.
    """
    if not isinstance(row, Mapping) or tags is None:
        return row
    text, said = row.get(words), row.get(tags)
    if not (isinstance(text, str) and isinstance(said, str)) or text.lstrip().startswith("["):
        return row
    parts = [part for part in text.split(" ") if part]
    given = [part for part in said.replace(",", " ").split(" ") if part]
    fits = len(parts) == len(given) and all(map(ENTITY.fullmatch, given))  # not a text and the name of its class
    fits = fits or (bool(parts) and not has_to_fit)
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
    tags = [tag.strip() if isinstance(tag, str) else tag for tag in tags]
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


_TEXTS = ("text", "sentence", "content", "data")
_SPANS = ("spans", "entities", "label", "labels")
_BEGINS, _ENDS = ("start", "start_offset", "start_char"), ("end", "end_offset", "end_char")
_KINDS = ("label", "labels", "type", "entity", "tag")
_NOT_ACCEPTED = ("reject", "ignore")
"""Answers of Prodigy: the row holds no annotation that anybody agreed with."""
_OF_ITS_OWN = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
"""Characters of scripts without spaces: each is a word, as for the tokenizers of such languages."""
_SHOWN = 40
Word = tuple[int, int]
"""Where a word of a text begins and ends, in characters."""


@dataclass(frozen=True)
class SpanColumns:
    """Where a table keeps texts and the spans of their entities."""

    text: str
    spans: str | None
    """None: there are no spans, and none are needed."""


def span_columns(rows: TableRows, named: Named, *, need_tags: bool) -> SpanColumns | None:
    """Return the columns of texts and spans; None if the rows hold lists of words, or something else."""
    texts = (named.words,) if named.words else _TEXTS
    spans = (named.tags,) if named.tags else _SPANS
    sample = [row for _, row in rows.take((*texts, *spans, *TAGS)) if isinstance(row, Mapping)]
    text = next((name for name in texts if sample and _is_text(sample[0].get(name))), None)
    said = [name for name in TAGS if isinstance(sample[0].get(name), str)] if text else []
    if text and not named.takes_tags:
        said = [name for name in said if _with_lists(sample[0], text, name) is not sample[0]]
    if text is None or said:
        return None
    found = next((name for name in spans if _are_spans([row.get(name) for row in sample])), None)
    others = [name for name in ("tokens", "words") if _holds_words(next((row.get(name) for row in sample), None))]
    return None if (found is None and need_tags) or others else SpanColumns(text, found)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith("[")


def _holds_words(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, str) for one in value)


def _are_spans(values: Sequence[Any]) -> bool:
    """Return whether these lists, some of which may be empty, hold spans."""
    lists = [value for value in values if value is not None]
    filled = [value for value in lists if value]
    return bool(lists) and all(isinstance(value, list) for value in lists) and all(map(_is_span, filled))


def _is_span(value: Any) -> bool:
    first = value[0]
    if isinstance(first, Mapping):
        return any(name in first for name in _BEGINS)
    return isinstance(first, list | tuple) and len(first) == 3 and isinstance(first[2], str)


def with_fields(rows: TableRows) -> TableRows:
    """Return rows with named fields, if they are spaCy's pairs: [text, {"entities": [...]}]."""
    if rows.columns:
        return rows
    placed = [*rows.take(())]
    if not placed or not all(_is_pair(row) for _, row in placed):
        return rows
    named = [(place, {"text": row[0], "entities": [], **row[1]}) for place, row in placed]
    return TableRows(["text", "entities"], lambda _: named)


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict)


def from_spans(rows: TableRows, columns: SpanColumns, bad: BadRows, *, need_tags: bool, limit: int | None) -> Sentences:
    """Return the sentences of a table whose rows hold a text, and the spans of its entities."""
    found = Collected(bad, limit)
    wanted = [columns.text, "tokens", "answer", *([columns.spans] if columns.spans else [])]
    n_not_accepted = 0
    for n, (place, row) in enumerate(rows.take(wanted)):
        if n == limit:
            break
        try:
            row = object_of(row, '{"text": "...", "label": [[0, 4, "PER"]]}')
            if need_tags and row.get("answer") in _NOT_ACCEPTED:
                n_not_accepted += 1
                continue
            text = text_field(row, columns.text)
            words = _words_of_text(text, row.get("tokens"))
            tags = (
                _tags_of_spans(text, words, row.get(columns.spans), columns.spans, needed=need_tags)
                if columns.spans
                else None
            )
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        found.words.append([text[begin:end] for begin, end in words])
        found.tags.append(tags)
        found.places.append(place)
    notes = [f"not read: {plural(n_not_accepted, 'row')} with the answer reject or ignore"] if n_not_accepted else []
    read = found.finish(columns.spans or "none")
    return replace(read, word_column=f"{columns.text}, cut into words", notes=notes)


def _words_of_text(text: str, tokens: Any) -> list[Word]:
    """Return the words of a text: the tokens of the row if it has some, else what spaces and punctuation part."""
    if isinstance(tokens, list) and all(isinstance(token, Mapping) for token in tokens):
        given = [(token.get("start"), token.get("end")) for token in tokens]
        if all(type(begin) is int and type(end) is int for begin, end in given):
            return [word for word in given if text[slice(*word)].strip()]  # spaCy has tokens of spaces
    return [piece for word in _by_punctuation(text) for piece in _by_script(text, word)]


def _by_punctuation(text: str) -> list[Word]:
    from tokenizers.pre_tokenizers import BertPreTokenizer

    return [word for _, word in BertPreTokenizer().pre_tokenize_str(text)]


def _by_script(text: str, word: Word) -> Iterator[Word]:
    """Yield the parts of a word, if it has characters that are words of their own."""
    begin, end = word
    for found in _OF_ITS_OWN.finditer(text, begin, end):
        if begin < found.start():
            yield begin, found.start()
        yield found.span()
        begin = found.end()
    if begin < end:
        yield begin, end


def _tags_of_spans(text: str, words: Sequence[Word], value: Any, name: str, *, needed: bool) -> list[str] | None:
    """Return the tags of the words, from the spans of the entities."""
    if value is None and not needed:
        return None
    if not isinstance(value, list):
        raise Rejected(
            f"{name} is missing" if value is None else f"{name} is {kind(value)}, not a list",
            got=value,
            why="each text has a list of spans, an empty one if it holds no entity",
            fix=f'write {name} as [[0, 4, "PER"]] or []',
        )
    tags = ["O"] * len(words)
    begins = {begin: n for n, (begin, _) in enumerate(words)}
    ends = {end: n for n, (_, end) in enumerate(words)}
    for n, span in enumerate(value):
        begin, end, label = _span(text, span, f"{name}[{n}]")
        if begin not in begins or end not in ends:
            raise _inside_a_word(text, words, (begin, end), f"{name}[{n}]")
        inside = range(begins[begin], ends[end] + 1)
        if any(tags[at] != "O" for at in inside):
            raise Rejected(
                f"{name}[{n}] overlaps another span",
                got=f"{label}: {text[begin:end][:_SHOWN]!r}",
                why="each word has one tag",
                fix="keep one of them, such as the longer",
            )
        for at in inside:
            tags[at] = f"{'B' if at == inside[0] else 'I'}-{label}"
    return tags


def _span(text: str, span: Any, where: str) -> tuple[int, int, str]:
    """Return where an entity begins and ends, without spaces around it, and its kind."""
    said = None
    if isinstance(span, Mapping):
        begin, end, label = (
            next((span[one] for one in names if one in span), None) for names in (_BEGINS, _ENDS, _KINDS)
        )
        label = label[0] if isinstance(label, list) and len(label) == 1 else label
        said = span.get("text")
    else:
        begin, end, label = span if isinstance(span, list | tuple) and len(span) == 3 else (None, None, None)
    if type(begin) is not int or type(end) is not int or not isinstance(label, str) or not label.strip():
        raise Rejected(
            f"{where} is no span with one label",
            got=span,
            why="a span says where it begins, where it ends, and what it is",
            fix='write [0, 4, "PER"], or {"start": 0, "end": 4, "label": "PER"}',
        )
    inside = text[begin:end] if 0 <= begin < end <= len(text) else ""
    if not inside.strip() or (isinstance(said, str) and said.strip() != inside.strip()):
        raise Rejected(
            f"{where} does not fit its text",
            got=f"{label} from {begin} to {end}: {inside[:_SHOWN]!r}" + (f", not {said[:_SHOWN]!r}" if said else ""),
            why=f"the text has {len(text)} characters (code points), counted from 0; the end is not part of the span",
            fix="correct begin and end; a tool that counts in UTF-16 units is off by one after each emoji",
        )
    return begin + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip()), label.strip()


def _inside_a_word(text: str, words: Sequence[Word], span: Word, where: str) -> Rejected:
    touched = [text[begin:end] for begin, end in words if begin < span[1] and end > span[0]]
    return Rejected(
        f"{where} begins or ends inside a word",
        got=f"{text[slice(*span)][:_SHOWN]!r} of {' '.join(touched)[:_SHOWN]!r}",
        why="each word has one tag; words end at spaces and at punctuation",
        fix="correct begin and end, put a space into the text, or leave such rows out: --skip_bad",
    )
