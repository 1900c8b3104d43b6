"""Examples of text classification: the columns of their texts and labels, and what the labels are.

A label is one class, several classes or a number; `Scheme` has the order of the classes, and encodes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.console import columns_line, plural
from whet.data.files.bad_rows import MAX_SHOWN, BadRows, Rejected, no_cycle_search
from whet.data.files.row_fields import kind, object_of, text_field
from whet.data.files.table import TableRows, read_table
from whet.errors import DataError, Problem
from whet.jobs.fields import file_of, limit_of
from whet.jobs.hub_data import hub_examples
from whet.jobs.left_out import LeftOut
from whet.tasks.classify.arguments import ClassifyArguments, ProblemType
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
    """The names of columns that a user gave; None if the data decides. An empty `pair`: one text a row."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    delimiter: str = " "
    takes_label: bool = True
    """Whether labels are read, if there are some."""


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
    is_single = named.pair is not None and not pair
    if not text:
        text, usual = _usual_texts(found, label, in_pairs=not is_single)
        pair = pair or usual
    elif named.pair is None and len(text) == 1:
        pair = tuple(other for a, b in PAIRS if (a,) == text and (other := _usual(found, [b])))[:1]
    if need_label and label not in found:
        rest = [name for name in found if name not in (*text, *pair)]
        label = rest[0] if len(rest) == 1 else None
        if label is None:
            raise _no_label(found)
    return Columns(text, pair, label if named.takes_label and label in found else None, named.delimiter)


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
            if need_label and "answer" not in columns.all:
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


def _usual_texts(found: Sequence[str], label: str | None, *, in_pairs: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for names in PAIRS if in_pairs else ():
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
    """Return the label as the data has it, without spaces around it; None for a gap where labels may be missing."""
    value = row.get(name) if name else None
    value = value.strip() if isinstance(value, str) else value
    gap = _is_gap(value)
    if gap and needed:
        raise Rejected(
            f"{name} is missing" if name not in row or value is None else f"{name} is empty",
            got=sorted(map(str, row)) if name not in row else value,
            why="every example to learn from or to evaluate on has a label",
            fix=f"fill {name}, or remove the row",
        )
    if gap:
        return None
    items = as_list(value)
    if not isinstance(value, dict) and any(isinstance(one, list | dict) for one in items):
        raise Rejected(
            f"{name} holds spans or objects, not labels",
            got=value,
            why="the labels of a text are a list of texts or numbers",
            fix="for spans of words use whet tag; else write the labels as a list of texts",
        )
    if any(map(_is_gap, items)):
        if not needed:
            return None
        raise Rejected(
            f"{name} holds an empty label",
            got=value,
            why="each item of a list names a label that applies; a text without any has an empty list",
            fix=f"fill the items of {name}, or take the empty ones out",
        )
    odd = [one for one in items if not isinstance(one, str | int | float)]
    if not odd:
        return items if isinstance(value, list) else value
    raise Rejected(
        f"{name} {'holds' if isinstance(value, list) else 'is'} {kind(odd[0])}",
        got=value,
        why="a label is a text, a number, or a list of them",
        fix=f"write {name} as a text or a number",
    )


def _is_gap(label: Any) -> bool:
    """Return whether this is no label: null, a blank text, or NaN, which is a gap of pandas."""
    return label is None or label != label or (isinstance(label, str) and not label.strip())


def _require_accepted(row: Mapping[str, Any]) -> None:
    """Refuse a row of Prodigy whose annotation was rejected or passed over: its label is not that of the text."""
    if (answer := row.get("answer")) in ("reject", "ignore"):
        raise Rejected(
            f"the answer of this row is {answer}",
            why="Prodigy keeps such rows, and their label is not that of the text",
            fix="export the accepted rows alone, or leave these out: --skip_bad; if Prodigy has not written the column "
            "answer, rename it",
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


def read_split(job: ClassifyArguments, name: str) -> Examples:
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


def _read(job: ClassifyArguments, name: str, limit: int | None) -> Examples:
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


_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_FRACTION = re.compile(r".*[.eE].*", re.DOTALL)
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class Scheme:
    """What labels are, and the classes in the order of the model's logits; none for regression."""

    kind: ProblemType
    names: tuple[str, ...] = ()

    def encode(self, examples: Examples) -> np.ndarray:
        """Return the labels as numbers: (rows,) int64 classes, (rows, classes) float32, or (rows,) float32 values.

        Raises DataError with the first labels that the scheme does not know, each with line, column and value.
        """
        assert examples.labels is not None
        index = {name: n for n, name in enumerate(self.names)}
        found, problems, n_bad = [], [], 0
        for row, label in enumerate(examples.labels):
            try:
                found.append(self._number(label, index))
            except ValueError as error:
                n_bad += 1
                if len(problems) < MAX_SHOWN:
                    problems.append(self._unknown(examples, row, str(error), is_first=not problems))
        if problems:
            raise DataError.of([*problems, *_more(examples.source, n_bad)])
        return np.asarray(found, dtype=np.int64 if self.kind == "single_label_classification" else np.float32)

    def known(self, examples: Examples) -> list[Any]:
        """Return the labels as numbers, as `encode` does; None for a label that is missing or not of this scheme."""
        index = {name: n for n, name in enumerate(self.names)}

        def number(label: Any) -> Any:
            try:
                return None if label is None else self._number(label, index)
            except ValueError:
                return None

        return [number(label) for label in examples.labels or [None] * len(examples)]

    def written(self, label: Any) -> Any:
        """Return a label of the data as predictions name theirs: a name, a list of names or a number; None: none."""
        if label is None:
            return None
        if self.kind == "multi_label_classification":
            return [text_of(one) for one in as_list(label)]
        is_number = self.kind == "regression" and _NUMBER.fullmatch(str(label))
        return float(label) if is_number else text_of(label)

    def _number(self, label: Any, index: Mapping[str, int]) -> Any:
        if self.kind == "regression":
            if isinstance(label, list | bool) or not _NUMBER.fullmatch(str(label)):
                raise ValueError("is no number")
            return float(label)
        if self.kind == "single_label_classification":
            if isinstance(label, list):
                raise ValueError("is a list, and each row has one label")
            return _index(label, index)
        row = np.zeros(len(index), dtype=np.float32)
        row[[_index(one, index) for one in as_list(label)]] = 1
        return row

    def _unknown(self, examples: Examples, row: int, why: str, *, is_first: bool) -> Problem:
        assert examples.labels is not None
        shown = ", ".join(self.names[:_SHOWN_NAMES]) + (", ..." if len(self.names) > _SHOWN_NAMES else "")
        if self.kind == "regression":
            rule = "regression learns numbers"
            fix = "correct the value; if labels are classes: --do_regression false, without --problem_type regression"
        elif isinstance(examples.labels[row], list) and self.kind == "single_label_classification":
            rule = "problem_type single_label_classification learns one label for each text"
            fix = "leave --problem_type out, or give each row one label"
        else:
            rule = f"the model knows {len(self.names)} labels" + (f": {shown}" if is_first else "")
            fix = "correct the label, or train with it"
        return Problem(
            what=f"{examples.where(row)}: {examples.columns.label} {why}", got=examples.labels[row], why=rule, fix=fix
        )


def kind_of(examples: Examples, asked: ProblemType | None, do_regression: bool | None) -> tuple[ProblemType, str]:
    """Return what the labels of these examples are, and why."""
    labels = examples.labels or ()
    if asked is not None:
        return asked, "as problem_type says"
    if do_regression:
        return "regression", "as do_regression says"
    if any(isinstance(label, list) or _is_json_list(label) for label in labels):
        return "multi_label_classification", "some rows have a list of labels"
    numbers = all(_NUMBER.fullmatch(str(label)) for label in labels)
    if do_regression is None and numbers and any(_FRACTION.fullmatch(str(label)) for label in labels):
        return "regression", "the labels are numbers with a decimal point; for classes: --do_regression false"
    return "single_label_classification", "each row has one label"


def scheme_of(examples: Examples, kind: ProblemType) -> Scheme:
    """Return the scheme of the training data: classes as texts, sorted, as run_classification.py orders them.

    A data set of the hub that names its classes gives their order itself.
    """
    assert examples.labels is not None
    if kind == "regression":
        return Scheme(kind)
    several = kind == "multi_label_classification"
    further = [label for label in examples.every_label if several or not (isinstance(label, list) or label is None)]
    every = [*examples.labels, *further]
    names = {text_of(one) for label in every for one in (as_list(label) if several else [label])}
    ordered = [name for name in examples.label_order if names] if names <= set(examples.label_order) else sorted(names)
    return Scheme(kind, tuple(ordered))


def labels_told_apart(examples: Examples, scheme: Scheme) -> Sequence[str]:
    """Return the labels that the examples have, or those that the data names; of several for each text, the lists."""
    if scheme.names and examples.label_order:
        return scheme.names
    several = scheme.kind == "multi_label_classification"
    found = (sorted({text_of(one) for one in as_list(label)}) if several else label for label in examples.labels or ())
    return sorted({text_of(label) for label in found})


def scheme_of_config(config: Any) -> Scheme:
    """Return what a trained model's configuration says of its labels."""
    names = tuple(str(config.id2label[n]) for n in range(config.num_labels))
    kind = getattr(config, "problem_type", None)
    if kind is None:
        kind = "regression" if len(names) == 1 else "single_label_classification"
    return Scheme(kind, () if kind == "regression" else names)


def text_of(label: Any) -> str:
    """Return the label as the configuration keeps it."""
    return label if isinstance(label, str) else json.dumps(label) if isinstance(label, list) else str(label)


def as_list(label: Any) -> list[Any]:
    """Return the labels of a row with several: a list, or in CSV a list as JSON text; one label is a list of one.

    Texts come without spaces around them.
    """
    items = label if isinstance(label, list) else json.loads(label) if _is_json_list(label) else [label]
    return [one.strip() if isinstance(one, str) else one for one in items]


def _is_json_list(label: Any) -> bool:
    if not (isinstance(label, str) and label.lstrip().startswith("[") and label.rstrip().endswith("]")):
        return False
    try:
        return isinstance(json.loads(label), list)
    except ValueError:
        return False


def _index(label: Any, index: Mapping[str, int]) -> int:
    if (found := index.get(text_of(label))) is None:
        raise ValueError("is a label that the model does not know")
    return found


def _more(source: str, n_bad: int) -> list[Problem]:
    if n_bad <= MAX_SHOWN:
        return []
    return [
        Problem(
            what=f"{source}: {n_bad} problems in all; the first {MAX_SHOWN} are listed above",
            why="each of these rows has a label that does not fit",
            fix="correct these rows, or remove them",
        )
    ]


_MISSING = re.compile(r"\s*(nan|n/?a|null|none|[+-]?inf(inity)?|#n/a|\?|-)?\s*", re.IGNORECASE)
_POINT = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")
_BITS = ("0", "1", "0.0", "1.0", "False", "True")
_PYTHON_LIST = re.compile(r"\s*\[\s*'.*'\s*,?\s*\]\s*", re.DOTALL)


class _Doubt(NamedTuple):
    """One look of labels: which label shows it, and what to say."""

    found: Callable[[Sequence[Any]], int | None]
    what: str
    why: str
    fix: str


def require_clear(examples: Examples) -> None:
    """Raise DataError for labels that say by their look what they do not say by their form.

    Only for labels whose kind whet chooses: an option that names the kind answers these questions.
    """
    labels = examples.labels or ()
    for doubt in _DOUBTS:
        if (row := doubt.found(labels)) is not None:
            raise DataError(
                what=f"{examples.where(row)}: {examples.columns.label} {doubt.what}",
                got=labels[row],
                why=doubt.why,
                fix=doubt.fix,
            )


def _first(labels: Sequence[Any], is_odd: Callable[[Any], bool]) -> int | None:
    return next((row for row, label in enumerate(labels) if is_odd(label)), None)


def _python_list(labels: Sequence[Any]) -> int | None:
    return _first(labels, lambda label: isinstance(label, str) and _PYTHON_LIST.fullmatch(label) is not None)


def _repeats(labels: Sequence[Any]) -> int | None:
    return _first([as_list(label) for label in labels], lambda label: len({str(one) for one in label}) < len(label))


def _vector(labels: Sequence[Any]) -> int | None:
    """Return the first row if each row is a list of as many zeros and ones: two of them need not repeat anything."""
    lists = [as_list(label) for label in labels]
    size = len(lists[0]) if lists else 0
    of_bits = size > 1 and all(len(one) == size and all(str(bit) in _BITS for bit in one) for one in lists)
    return 0 if of_bits else None


def _comma(labels: Sequence[Any]) -> int | None:
    texts = [str(label) for label in labels]
    if not all(_COMMA.fullmatch(text) or _POINT.fullmatch(text) for text in texts):
        return None
    return _first(texts, lambda text: _COMMA.fullmatch(text) is not None)


def _missing_number(labels: Sequence[Any]) -> int | None:
    texts = [str(label) for label in labels]
    if not all(_POINT.fullmatch(text) or _MISSING.fullmatch(text) for text in texts):
        return None
    has_fractions = any("." in text for text in texts)
    return _first(texts, lambda text: _POINT.fullmatch(text) is None) if has_fractions else None


_DOUBTS = (
    _Doubt(
        found=_python_list,
        what="is a list as Python prints it",
        why="a list in a text file is JSON, with double quotes; as it stands, the complete text would be a label",
        fix="write lists with json.dumps; if this text is a label: --problem_type single_label_classification",
    ),
    _Doubt(
        found=_repeats,
        what="is a list that names a label more than once",
        why="a list holds the names of the labels that apply; of zeros and ones it would hold the names 0 and 1",
        fix='write the names, such as ["sport", "music"]; if the repetition is meant: '
        "--problem_type multi_label_classification",
    ),
    _Doubt(
        found=_vector,
        what="is a list of zeros and ones, as in every row",
        why="a list holds the names of the labels that apply: with the names 0 and 1, each row would have both",
        fix='write the names, such as ["sport", "music"], or the one that applies, without a list',
    ),
    _Doubt(
        found=_comma,
        what="has a decimal comma",
        why="numbers have a decimal point; with a comma, each value would be a class",
        fix="write 0.5 for 0,5; if the labels are classes: --do_regression false",
    ),
    _Doubt(
        found=_missing_number,
        what="is no number, and all others are",
        why="regression learns numbers; as it stands, each value would be a class",
        fix="correct or remove the row; if the labels are classes: --do_regression false",
    ),
)
