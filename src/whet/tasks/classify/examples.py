"""Examples of text classification: which columns of a file or a data set hold the texts and the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.console import plural
from whet.data.files.bad_rows import BadRows, no_cycle_search
from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, object_of, text_field
from whet.data.files.table import TableRows, columns_line, read_table
from whet.jobs.hub_data import file_of, hub_examples, limit_of
from whet.jobs.left_out import LeftOut
from whet.tasks.classify.arguments import ClassifyFields
from whet.watch import printing

_EXAMPLE = '{"text": "...", "label": "..."}'
"""What a row looks like, for messages."""

PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "answer")),
    *(("question", "sentence"), ("query", "passage"), ("text1", "text2")),
)
TEXTS = ("sentence", "text", "content", "review", "document", "utterance", "question")
_MOST_WORDS = 3
"""Words of a column's name."""
LABELS = ("label", "labels", "category", "class", "target", "intent", "score")


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; several of one text are joined with `delimiter`."""

    text: tuple[str, ...]
    pair: tuple[str, ...] = ()
    label: str | None = None
    """None: the examples have no labels."""
    delimiter: str = " "

    @property
    def all(self) -> list[str]:
        """Every column that is read."""
        return [*self.text, *self.pair, *([self.label] if self.label else [])]


@dataclass(frozen=True)
class Examples:
    """Texts with their labels as the data has them; rows that `skip_bad` left out are named in `left_out`."""

    source: str
    texts: Sequence[str]
    pairs: Sequence[str] | None
    """The second texts; None: one text a row."""
    labels: Sequence[Any] | None
    """Texts, numbers, lists, or None if a row has no label; None: no row has one."""
    places: Sequence[str]
    """Where each example stands, such as line 7."""
    columns: Columns
    left_out: LeftOut = field(default_factory=LeftOut)
    label_order: Sequence[str] = field(default=())
    """The names of the labels in the order of the data set, if that says one."""
    not_read: Sequence[str] = ()
    """The other columns of the data."""
    every_label: Sequence[Any] = ()
    """The labels of all rows, where the examples are only some of them."""

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, example: int) -> str:
        """Return the place of this example, for messages."""
        return f"{self.source}: {self.places[example]}"

    def take(self, examples: Sequence[int]) -> Examples:
        """Return these examples, in this order."""

        def some(values: Sequence[Any] | None) -> Any:
            return None if values is None else [values[n] for n in examples]

        return replace(
            self,
            texts=some(self.texts),
            pairs=some(self.pairs),
            labels=some(self.labels),
            places=some(self.places),
        )


@dataclass(frozen=True)
class Named:
    """The names of columns that a user gave; None if the data decides."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str = " "


def choose_columns(found: Sequence[str], named: Named, *, need_label: bool) -> Columns:
    """Return which columns of a table are read; raises Rejected if a named one is missing or none can be chosen."""
    label = named.label or _usual(found, LABELS)
    given = {"--text_column_names": _split(named.text), "--text_pair_column_names": _split(named.pair)}
    if need_label and named.label:
        given["--label_column_name"] = (named.label,)
    missing = {flag: gone for flag, names in given.items() if (gone := [name for name in names if name not in found])}
    if missing:
        raise _missing(missing, found)
    text, pair = _split(named.text), _split(named.pair)
    if not text:
        text, usual = _usual_texts(found, label)
        pair = pair or usual
    elif not pair and len(text) == 1:
        pair = tuple(other for a, b in PAIRS if (a,) == text and (other := _usual(found, [b])))[:1]
    if need_label and label not in found:
        rest = [name for name in found if name not in (*text, *pair)]
        label = rest[0] if len(rest) == 1 else None
        if label is None:
            raise _no_label(found)
    return Columns(text, pair, label if label in found else None, named.delimiter)


def collect(rows: TableRows, columns: Columns, bad: BadRows, *, need_label: bool, limit: int | None) -> Examples:
    """Return the examples of a table, the first `limit` of them; raises one DataError that reports all bad rows."""
    texts: list[str] = []
    pairs: list[str] = []
    labels: list[Any] = []
    places: list[str] = []
    for n, (place, row) in enumerate(rows.take((*columns.all, "answer"))):
        if n == limit:
            break
        try:
            row = object_of(row, _EXAMPLE)
            text = _text(row, columns.text, columns.delimiter)
            pair = _text(row, columns.pair, columns.delimiter) if columns.pair else ""
            label = _label(row, columns.label, needed=need_label)
            if need_label and columns.label != "answer":
                _require_accepted(row)
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        texts.append(text)
        pairs.append(pair)
        labels.append(label)
        places.append(place)
    bad.refuse(len(texts), "example")
    return Examples(
        source=bad.source,
        texts=texts,
        pairs=pairs if columns.pair else None,
        labels=labels if any(label is not None for label in labels) else None,
        places=places,
        columns=columns,
        left_out=LeftOut.of(bad),
    )


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()


def _usual(found: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first of these names that a column has, in capitals or not; None if no column has one."""
    known = {str(name).lower(): name for name in reversed(found)}
    return next((known[name] for name in names if name in known), None)


def _usual_texts(found: Sequence[str], label: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for names in PAIRS:
        first, second = (_usual(found, [name]) for name in names)
        if first and second:
            return (first,), (second,)
    others = [name for name in found if name != label]
    usual = _usual(others, TEXTS)
    if usual or (len(others) == 1 and not _is_text(others[0])):
        return (usual or others[0],), ()
    raise Rejected(
        "it is not known which column holds the text",
        got=f"columns found: {', '.join(map(str, found)) or 'none'}",
        why=f"none of them has a usual name ({', '.join(TEXTS)}); in CSV the first line names the columns",
        fix="name it: --text_column_names NAME (several names, separated by commas, are joined); if the file begins "
        "with a row, write a line with names above it, such as text,label",
    )


def _is_text(name: str) -> bool:
    """Return whether this is hardly the name of a column, but the first row of a file without names."""
    return len(str(name).split()) > _MOST_WORDS


def _text(row: Mapping[str, Any], names: Sequence[str], delimiter: str) -> str:
    """Return the text of these columns; of several, some may be empty."""
    if len(names) == 1:
        return text_field(row, names[0])
    filled = [text_field(row, name) for name in names if row.get(name) not in (None, "")]
    return delimiter.join(filled) if filled else text_field(row, names[0])


def _label(row: Mapping[str, Any], name: str | None, *, needed: bool) -> Any:
    """Return the label as the data has it; None for a gap where labels may be missing."""
    value = row.get(name) if name else None
    value = value.strip() if isinstance(value, str) else value
    gap = value is None or value == "" or value != value  # NaN: a gap of pandas
    if gap and needed:
        raise Rejected(
            f"{name} is missing" if name not in row or value is None else f"{name} is empty",
            got=sorted(map(str, row)) if name not in row else value,
            why="every example to learn from or to evaluate on has a label",
            fix=f"fill {name}, or remove the row",
        )
    if gap:
        return None
    if isinstance(value, list) and any(isinstance(one, list | dict) for one in value):
        raise Rejected(
            f"{name} holds spans or objects, not labels",
            got=value,
            why="the labels of a text are a list of texts or numbers",
            fix="for spans of words use whet tag; else write the labels as a list of texts",
        )
    if isinstance(value, str | int | float | list):
        return value
    raise Rejected(
        f"{name} is {kind(value)}",
        got=value,
        why="a label is a text, a number, or a list of them",
        fix=f"write {name} as a text or a number",
    )


def _require_accepted(row: Mapping[str, Any]) -> None:
    """Refuse a row of Prodigy whose annotation was rejected or passed over: its label is not that of the text."""
    if (answer := row.get("answer")) in ("reject", "ignore"):
        raise Rejected(
            f"the answer of this row is {answer}",
            why="Prodigy keeps such rows, and their label is not that of the text",
            fix="export the accepted rows alone, or leave these out: --skip_bad",
        )


def _missing(missing: Mapping[str, Sequence[str]], found: Sequence[str]) -> Rejected:
    """Return the error for columns that these options name, and that the data does not have."""
    names = [name for named in missing.values() for name in named]
    many = len(names) > 1
    return Rejected(
        f"the column{'s' if many else ''} {', '.join(names)} {'are' if many else 'is'} missing",
        got=f"columns found: {', '.join(map(str, found)) or 'none'}",
        why="the options name it, or the training of this model did",
        fix=f"correct {' and '.join(missing)}, or --csv_delimiter",
    )


def _no_label(found: Sequence[str]) -> Rejected:
    return Rejected(
        "it is not known which column holds the label",
        got=f"columns found: {', '.join(map(str, found)) or 'none'}",
        why=f"none of them has a usual name ({', '.join(LABELS)})",
        fix="name it: --label_column_name NAME",
    )


def read_split(job: ClassifyFields, name: str) -> Examples:
    """Return the examples of the split `train`, `validation` or `test`; a test split needs no labels."""
    limit = limit_of(job, name)
    shuffled = name == "train" and job.shuffle_train_dataset
    examples = _read(job, name, None if shuffled else limit)
    if name == "train" and limit is not None:  # the model has the labels of all rows, as run_classification.py says
        every = examples if shuffled or examples.label_order else _read(replace(job, skip_bad=True), name, None)
        examples = replace(examples, every_label=every.labels or ())
    if shuffled:
        order = np.random.default_rng(job.shuffle_seed).permutation(len(examples))
        examples = examples.take(order[:limit].tolist())
    examples.left_out.log(name, "example")
    columns = examples.columns
    read = {
        "text": columns.text,
        **({"second text": columns.pair} if columns.pair else {}),
        "label": columns.label or (),
    }
    printing.show_wrapped(f"{name}: {plural(len(examples), 'example')}; {columns_line(read, examples.not_read)}")
    return examples


def read_file(
    path: Path, named: Named, *, delimiter: str | None, need_label: bool, limit: int | None, skip_bad: bool
) -> Examples:
    """Return the examples of a file in any format; raises DataError with everything that is wrong in it."""
    try:
        with no_cycle_search():
            return _examples(read_table(path, delimiter), named, BadRows(str(path), skip_bad=skip_bad),
                             need_label=need_label, limit=limit)  # fmt: skip
    except Rejected as problem:
        raise problem.error(str(path)) from None


def _read(job: ClassifyFields, name: str, limit: int | None) -> Examples:
    named = Named(job.text_column_names, job.text_pair_column_names, job.label_column_name, job.text_column_delimiter)
    need_label = name != "test"
    if (file := file_of(job, name)) is not None:
        return read_file(file, named, delimiter=job.csv_delimiter, need_label=need_label, limit=limit,
                         skip_bad=job.skip_bad)  # fmt: skip

    def take(rows: TableRows, bad: BadRows) -> Examples:
        return _examples(rows, named, bad, need_label=need_label, limit=limit)

    return hub_examples(job, name, limit, take)


def _examples(rows: TableRows, named: Named, bad: BadRows, *, need_label: bool, limit: int | None) -> Examples:
    columns = choose_columns(rows.columns, named, need_label=need_label)
    found = collect(rows, columns, bad, need_label=need_label, limit=limit)
    order = rows.class_names.get(columns.label or "", ())
    return replace(found, label_order=order, not_read=rows.not_read(columns.all))
