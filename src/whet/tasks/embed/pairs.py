"""Pairs of texts that belong together, with scores or with texts that do not fit: read from a table or a SQuAD file.

The columns get sentence-transformers' names for what they hold: anchor, positive, negative, or sentence_A, sentence_B,
score. Which column is which, the options say; without them usual names do, or the number and kind of the columns. What
more than one reading fits is refused.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from whet.console import columns_line, plural
from whet.data.files.bad_rows import BadRows, Rejected, no_cycle_search
from whet.data.files.file_bytes import read_bytes, text_of
from whet.data.files.row_fields import kind, object_of, text_field
from whet.data.files.table import PlacedRow, TableRows, read_table
from whet.errors import DataError
from whet.jobs.fields import file_of, limit_of
from whet.jobs.hub_data import hub_examples
from whet.jobs.left_out import LeftOut
from whet.tasks.embed.arguments import PairFields, require_package
from whet.watch import printing

_EXAMPLE = '{"anchor": "...", "positive": "..."}'
"""What a row looks like, for messages."""
_PAIRS = (
    *(("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("query", "passage"), ("query", "document")),
    *(("query", "answer"), ("query", "context"), ("query", "response"), ("query", "text"), ("question", "positive")),
    *(("question", "answer"), ("question", "context"), ("question", "passage"), ("question", "document")),
    *(("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("sentence_a", "sentence_b"), ("text1", "text2")),
    *(("text_a", "text_b"), ("premise", "hypothesis"), ("question1", "question2")),
)
"""Usual names of the two columns of a pair, in small letters."""
_NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?", re.IGNORECASE)
_OF_SCALE = ("score", "similarity", "similarity_score", "relevance", "relevance_score", "relatedness_score", "scores")
"""Usual names of how well two texts fit."""
_SCORES = (*_OF_SCALE, "is_duplicate", "label", "labels")
"""Usual names of a score; the last may as well hold numbers of classes."""
_TELLS = re.compile(r"(?i:(^|[\W_])(labels?|class|judge?ment|verdict|gold)($|[\W_])|entail|duplicate|paraphras)")
"""Names of columns that say whether two texts fit, in words."""
_IDENTIFIER = re.compile(r"(?i:|id|idx|index|uuid|guid|[qpd]id\d*|docid|unnamed: ?\d+|.*_(id|ids|idx))|\w*[a-z]I[Dd]s?")
"""Names of columns that hold no text: they are passed over where the number of columns decides."""
_ASKS = ("question", "context")
_ANSWERS = ("answers", "answer_text", "is_impossible")
"""Columns of SQuAD's flat form that say whether a question has an answer; `answer_start` says nothing more."""
_MOST_WORDS = 3
"""Words of a column's name: more are hardly a name, but the first row of a file without a header."""
_PEEKED = 200
"""Rows by which a column's kind is guessed."""
_MOST_CLASSES = 10
"""Numbers of classes in a message."""
_SCALE = 5.0
"""The highest score of the other usual scale."""
_SPLIT_SEED = 42
TEXTS = (
    "text",
    "passage",
    "document",
    "context",
    "positive",
    "sentence",
    "content",
    "body",
    "query",
    "question",
    "anchor",
)
"""Usual names of the only text of a row."""


@dataclass(frozen=True)
class Columns:
    """Which columns of the data hold what."""

    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()
    score: str | None = None
    score_is_named: bool = False
    """Whether an option names the score, and not its usual name or its place."""

    @property
    def all(self) -> list[str]:
        """Every column that is read."""
        return [self.anchor, self.positive, *self.negatives, *([self.score] if self.score else [])]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a split, in the order of the data; rows that `skip_bad` left out are named in `left_out`."""

    source: str
    anchors: Sequence[str]
    positives: Sequence[str]
    negatives: Sequence[Sequence[str]] = ()
    """One list for each negative of a row."""
    scores: Sequence[float] | None = None
    """From 0 to 1; None: the pairs belong together."""
    left_out: LeftOut = field(default_factory=LeftOut)
    notes: Sequence[str] = ()
    """What the reader has decided, for people."""
    read: Columns | None = None
    """The columns of the data; None: the pairs were made here."""

    def __len__(self) -> int:
        return len(self.anchors)

    def take(self, rows: Sequence[int]) -> Pairs:
        """Return these pairs, in this order."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[n] for n in rows]

        return replace(
            self,
            anchors=some(self.anchors),
            positives=some(self.positives),
            negatives=[some(one) for one in self.negatives],
            scores=None if self.scores is None else some(self.scores),
        )

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns in the order that sentence-transformers' losses read them, under its own names."""
        if self.scores is not None:
            return {"sentence_A": [*self.anchors], "sentence_B": [*self.positives], "score": [*self.scores]}
        found: dict[str, list[Any]] = {"anchor": [*self.anchors], "positive": [*self.positives]}
        names = ["negative"] if len(self.negatives) == 1 else [f"negative_{n + 1}" for n in range(len(self.negatives))]
        return found | {name: [*texts] for name, texts in zip(names, self.negatives, strict=True)}


def read_split(job: PairFields, split: str) -> Pairs:
    """Return the pairs of the split `train` or `validation`; prints which columns were read."""
    require_package()
    divided = job.validation_split_percentage is not None
    limit = limit_of(job, split)
    if divided:
        every = _read(job, "train", None)
        pairs = _part_of(every, job.validation_split_percentage or 0, split)
        pairs = pairs if limit is None else pairs.take(range(min(limit, len(pairs))))
    else:
        pairs = _read(job, split, limit)
    pairs.left_out.log(split, "pair")
    printing.show_wrapped("; ".join([f"{split}: {plural(len(pairs), 'pair')}", *pairs.notes]))
    return pairs


def _read(job: PairFields, split: str, limit: int | None) -> Pairs:
    if (file := file_of(job, split)) is None:
        return hub_examples(job, split, limit, lambda rows, bad: _of_table(rows, job, bad, limit))
    return read_pairs(file, job, limit)


def read_pairs(file: Path, job: PairFields, limit: int | None = None) -> Pairs:
    """Return the pairs of a file in any form; raises DataError with everything that is wrong in it."""
    try:
        with no_cycle_search():
            rows, bad = read_table(file, job.csv_delimiter), BadRows(str(file), skip_bad=job.skip_bad)
            return (
                _of_squad(rows, job, bad, limit) if "paragraphs" in rows.columns else _of_table(rows, job, bad, limit)
            )
    except Rejected as problem:
        raise problem.error(str(file)) from None


def _part_of(pairs: Pairs, percentage: float, split: str) -> Pairs:
    """Return the part of a file for this split: all rows of an anchor are in one of the two."""
    anchors = list(dict.fromkeys(pairs.anchors))
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(anchors))
    n_validation = max(1, round(len(anchors) * percentage / 100))
    if len(anchors) <= n_validation:
        raise DataError(
            what=f"{pairs.source}: there are too few pairs to set some aside",
            got=plural(len(anchors), "text") + " in the first column that differ",
            why="training and evaluation need one each",
            fix="add pairs, or leave --validation_split_percentage and --do_eval out",
        )
    chosen = {anchors[n] for n in order[:n_validation]}
    wanted = split == "validation"
    return pairs.take([n for n, anchor in enumerate(pairs.anchors) if (anchor in chosen) == wanted])


# ---- tables ----


def _of_table(rows: TableRows, job: PairFields, bad: BadRows, limit: int | None) -> Pairs:
    columns = choose_columns(rows, job)
    asks = (columns.anchor.lower(), columns.positive.lower()) == _ASKS
    known = [name for name in (*rows.columns, *rows.objects) if asks and name.partition(".")[0] in _ANSWERS]
    if columns.score is not None and columns.negatives:
        negatives = ",".join(columns.negatives)
        raise Rejected(
            "the rows have a score and texts that do not fit",
            got=f"score: {columns.score}; negatives: {negatives}",
            why="a row is a pair with a score, or a pair with texts that do not fit, and the other would not be read",
            fix=f"name one: --score_column_name {columns.score} or --negative_column_names {negatives}",
        )
    if columns.score is None and not columns.negatives and job.anchor_column_name is None:
        _require_no_score(rows, columns, [*known, "answer_start"] if asks else [])
    n_without = 0

    def answerable() -> Iterator[PlacedRow]:
        nonlocal n_without
        for place, row in rows.take([*columns.all, *known]):
            try:
                if known and isinstance(row, Mapping) and _has_no_answer(row):
                    n_without += 1
                    continue
            except Rejected as problem:
                yield place, problem
                continue
            yield place, row

    found = _collect(answerable(), columns, bad, limit)
    notes = [*found.notes, *_without_answer(n_without)]
    read: dict[str, str | Sequence[str]] = {"first text": columns.anchor, "second text": columns.positive}
    read |= {"negatives": columns.negatives} if columns.negatives else {}
    read |= {"score": columns.score} if columns.score else {}
    notes = [columns_line(read, rows.not_read([*columns.all, *known])), *notes]
    return replace(found, notes=notes, read=columns)


def choose_columns(rows: TableRows, job: PairFields) -> Columns:
    """Return which columns of a table hold what; raises Rejected if the names do not say it and the data neither."""
    found = [str(name) for name in rows.columns]
    negatives = tuple(one.strip() for one in (job.negative_column_names or "").split(",") if one.strip())
    _require_there(job, negatives, found)
    taken = {job.anchor_column_name, job.positive_column_name, job.score_column_name, *negatives}
    score, rest = job.score_column_name, [name for name in found if name not in taken]
    if score is None and not negatives:
        score = _usual(rest, _SCORES)
    if not negatives and job.score_column_name is None:
        negatives = tuple(name for name in rest if _NEGATIVE.fullmatch(name))
    is_named = job.score_column_name is not None
    if job.anchor_column_name and job.positive_column_name:
        return Columns(job.anchor_column_name, job.positive_column_name, negatives, score, is_named)
    for names in _PAIRS:
        first, second = (_usual(rest, [name]) for name in names)
        if first and second:
            return Columns(first, second, negatives, score, is_named)
    texts = [name for name in rest if name != score and name not in negatives and not _IDENTIFIER.fullmatch(name)]
    peeked = [*islice(rows.take(texts), _PEEKED)]
    if len(texts) == 3 and score is None and not negatives and _are_numbers(peeked, texts[2]):
        score = texts.pop()
    numbers = [name for name in texts if _are_numbers(peeked, name)]
    if len(texts) != 2 or numbers or any(len(name.split()) > _MOST_WORDS for name in found):
        raise _not_known(found, numbers)
    return Columns(texts[0], texts[1], negatives, score, is_named)


def _require_no_score(rows: TableRows, columns: Columns, others: Sequence[str]) -> None:
    """Raise Rejected for a column that nobody reads and that may say that some of the pairs do not fit.

    Fields of objects and `others` are no such columns.
    """
    unread = [
        name
        for name in map(str, rows.not_read([*columns.all, *rows.objects, *others]))
        if not _IDENTIFIER.fullmatch(name)
    ]
    peeked = [*islice(rows.take(unread), _PEEKED)] if unread else []
    of_numbers = [name for name in unread if _are_numbers(peeked, name, gaps=True)]
    of_words = [name for name in unread if name not in of_numbers and _TELLS.search(name)]
    if not of_numbers and not of_words:
        return
    raise Rejected(
        "it is not known whether all pairs belong together",
        got=f"first text: {columns.anchor}; second text: {columns.positive}; not read: "
        + ", ".join([*(f"{name} (numbers)" for name in of_numbers), *of_words]),
        why="a column next to them may say which pairs fit, and without it every pair would count as one that does",
        fix=f"if it is a score from 0 to 1 or 0 to 5: --score_column_name {(of_numbers or of_words)[0]}; if all pairs "
        f"belong together: --anchor_column_name {columns.anchor} --positive_column_name {columns.positive}; else write "
        "those that do into a file of their own",
    )


def _require_there(job: PairFields, negatives: Sequence[str], found: Sequence[str]) -> None:
    given = {
        "anchor_column_name": [job.anchor_column_name],
        "positive_column_name": [job.positive_column_name],
        "negative_column_names": negatives,
        "score_column_name": [job.score_column_name],
    }
    missing = {
        flag: gone for flag, names in given.items() if (gone := [one for one in names if one and one not in found])
    }
    if missing:
        raise Rejected(
            f"no column is named {' or '.join(name for names in missing.values() for name in names)}",
            got=f"columns found: {', '.join(found) or 'none'}",
            why="an option names it",
            fix=f"correct {' and '.join(f'--{flag}' for flag in missing)}, or --csv_delimiter",
        )


def _usual(found: Sequence[str], names: Sequence[str]) -> str | None:
    known = {name.lower(): name for name in reversed(found)}
    return next((known[name] for name in names if name in known), None)


def _are_numbers(rows: Sequence[PlacedRow], name: str, *, gaps: bool = False) -> bool:
    """Return whether every value of the column is a number, and there is one.

    With `gaps` some may be missing, and the words true and false are numbers, too.
    """
    values = [row.get(name) for _, row in rows if isinstance(row, Mapping)]
    if gaps:
        values = [value.strip() if isinstance(value, str) else value for value in values]
        values = [value for value in values if value is not None and value != "" and value == value]  # NaN is a gap
        values = [_TRUTH.get(str(value).lower(), value) for value in values]
    return bool(values) and all(_number(value) is not None for value in values)


_TRUTH = {"true": True, "false": False}


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _not_known(found: Sequence[str], numbers: Sequence[str]) -> Rejected:
    of_numbers = f"; {', '.join(numbers)} {'holds' if len(numbers) == 1 else 'hold'} numbers" if numbers else ""
    return Rejected(
        "it is not known which columns hold the texts of a pair",
        got=f"columns found: {', '.join(found) or 'none'}{of_numbers}",
        why="without usual names, such as anchor and positive, there have to be two columns of texts, and at most one "
        "of numbers behind them; in CSV the first line names the columns",
        fix="name them: --anchor_column_name NAME --positive_column_name NAME, and if the data has them "
        "--negative_column_names NAMES or --score_column_name NAME; if the file begins with a row, write a line with "
        "names above it, such as anchor,positive",
    )


def _collect(rows: Iterable[PlacedRow], columns: Columns, bad: BadRows, limit: int | None) -> Pairs:
    """Return the pairs of these rows, the first `limit`; raises one DataError that reports all bad rows."""
    anchors: list[str] = []
    positives: list[str] = []
    negatives: list[list[str]] = []
    scores: list[float] = []
    for n, (place, row) in enumerate(rows):
        if n == limit:
            break
        try:
            row = object_of(row, _EXAMPLE)
            anchor, found = text_field(row, columns.anchor), _texts(row, columns.positive)
            others = [text for name in columns.negatives for text in _texts(row, name)]
            if negatives and len(others) != len(negatives[0]):
                raise _other_number(len(others), len(negatives[0]))
            score = _score(row, columns.score) if columns.score else 0.0
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        for positive in found:
            anchors.append(anchor)
            positives.append(positive)
            negatives.append(others)
            scores.append(score)
    bad.refuse(len(anchors), "pair")
    pairs = Pairs(bad.source, anchors, positives, left_out=LeftOut.of(bad))
    if columns.score is None:
        return replace(pairs, negatives=[[*texts] for texts in zip(*negatives, strict=True)])
    _require_no_classes(scores, columns, bad.source)
    scaled, notes = _scaled(scores, columns.score, bad.source)
    return replace(pairs, scores=scaled, notes=notes)


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of a column: one, or those of a list."""
    value = row.get(name)
    if not isinstance(value, list):
        return [text_field(row, name)]
    if not value:
        raise Rejected(f"{name} is an empty list", why="a row has a text here", fix="fill it, or remove the row")
    return [text_field({name: one}, name) for one in value]


def _other_number(n_texts: int, wanted: int) -> Rejected:
    return Rejected(
        f"the row has {plural(n_texts, 'negative')}, and others have {wanted}",
        why="the loss compares a query with as many texts in each row",
        fix="give every row as many, or write each negative into a row of its own",
    )


def _score(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    number = _number(value.strip() if isinstance(value, str) else value)
    if number is None:
        raise Rejected(
            f"{name} is {kind(value)}, not a number" if name in row else f"{name} is missing",
            got=value,
            why="a score says how well two texts fit: 0 to 1, or 0 to 5",
            fix=f"write {name} as a number; if it is no score, name the right column: --score_column_name NAME; and if "
            "there is none, name the two texts alone in a file of their own",
        )
    return number


def _require_no_classes(scores: Sequence[float], columns: Columns, source: str) -> None:
    """Raise DataError for a column whose whole numbers may be those of classes: their order says nothing then."""
    name, found = str(columns.score), {*scores}
    if columns.score_is_named or name.lower() in _OF_SCALE or not all(score.is_integer() for score in found):
        return
    if found <= {0.0, 1.0} and columns.anchor.lower() != "premise":
        return
    raise DataError(
        what=f"{source}: {name} may hold numbers of classes, and not scores",
        got=f"{name}: {', '.join(f'{one:g}' for one in sorted(found)[:_MOST_CLASSES])}",
        why="a higher score says that two texts fit better; of classes, such as entailment (0), neutral and "
        "contradiction, the first number may be the best",
        fix=f"if higher is better: --score_column_name {name}; else write scores from 0 to 1 into it, or the pairs "
        "that belong together into a file without it",
    )


def _scaled(scores: Sequence[float], name: str, source: str) -> tuple[list[float], list[str]]:
    """Return the scores from 0 to 1, and what was done for it."""
    low, high = min(scores), max(scores)
    if low < 0 or high > _SCALE:
        raise DataError(
            what=f"{source}: {name} has no usual scale",
            got=f"from {low:g} to {high:g}",
            why="scores are 0 to 1, or 0 to 5",
            fix="divide them so that they are from 0 to 1; or name another column: --score_column_name NAME",
        )
    if low == high:
        raise DataError(
            what=f"{source}: all pairs have the same score",
            got=f"{name}: {low:g}",
            why="the model learns which pairs fit better than others",
            fix="add pairs with other scores; or write pairs that belong together into a file without this column",
        )
    if high > 1:
        return [score / _SCALE for score in scores], [f"{name}: 0 to 5, divided by 5"]
    return [*scores], []


# ---- SQuAD ----


def _of_squad(rows: TableRows, job: PairFields, bad: BadRows, limit: int | None) -> Pairs:
    """Return each question that has an answer with its context."""
    named = ("anchor_column_name", "positive_column_name", "negative_column_names", "score_column_name")
    if given := [name for name in named if getattr(job, name)]:
        raise Rejected(
            f"{' and '.join(given)} would change nothing here",
            why="this is a SQuAD file: its questions are paired with their contexts",
            fix=f"leave {' and '.join(f'--{name}' for name in given)} out",
        )
    n_without = 0

    def pairs() -> Iterator[PlacedRow]:
        nonlocal n_without
        for place, row in rows.take(["paragraphs"]):
            for n, paragraph in enumerate(_list_of(row, "paragraphs")):
                for m, asked in enumerate(_list_of(paragraph, "qas")):
                    if _has_no_answer(asked):
                        n_without += 1
                        continue
                    where = f"{place}, paragraph {n}, question {m}"
                    yield where, {"question": asked.get("question"), "context": paragraph.get("context")}

    columns = Columns("question", "context")
    found = _collect(pairs(), columns, bad, limit)
    notes = ["questions of a SQuAD file with their contexts"]
    return replace(found, notes=[*notes, *_without_answer(n_without)], read=columns)


def _without_answer(n_questions: int) -> list[str]:
    return [f"{plural(n_questions, 'question')} without an answer not read"] if n_questions else []


def _has_no_answer(asked: Mapping[str, Any]) -> bool:
    """Return whether the context holds no answer to this question, in either form of SQuAD; Rejected if it is unclear.

    The answers are a list of them, an object with a list of their texts, or either as JSON in a cell of a CSV file.
    """
    impossible = asked.get("is_impossible")
    if _TRUTH.get(str(impossible).strip().lower(), impossible) in (True, 1, "1"):
        return True
    if "answers" not in asked:
        return "answer_text" in asked and not str(asked["answer_text"] or "").strip()
    answers = asked["answers"]
    if isinstance(answers, str) and answers.strip():
        try:
            answers = json.loads(answers)
        except ValueError:
            raise Rejected(
                "answers cannot be read",
                got=answers,
                why="questions without an answer are left out, and this is no JSON",
                fix="write the answers as JSON, or leave the column out if each question has one",
            ) from None
    texts = answers.get("text") if isinstance(answers, Mapping) else answers
    return not (any(map(_is_answer, texts)) if isinstance(texts, list) else texts)


def _is_answer(one: Any) -> bool:
    text = one.get("text") if isinstance(one, Mapping) else one
    return bool(text.strip()) if isinstance(text, str) else text is not None


def _list_of(row: Any, name: str) -> list[Mapping[str, Any]]:
    found = object_of(row, '{"paragraphs": [{"context": "...", "qas": [...]}]}').get(name)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise Rejected(
            f"{name} is {kind(found)}, not a list of objects",
            why="a SQuAD file has articles with paragraphs, and paragraphs with questions",
            fix="write it as SQuAD does, or give the pairs as a table",
        )
    return found


# ---- texts alone ----


@dataclass(frozen=True)
class Texts:
    """Rows to predict, in the order of the file."""

    texts: Sequence[str]
    others: Sequence[str] | None
    """The second texts of pairs; None: one text a row."""
    places: Sequence[str]
    left_out: LeftOut
    n_blank: int = 0
    """Blank lines of a plain text file before its last text: they are no rows."""
    column: str | None = None
    """The column of `texts`; None: the file has none."""
    read: str = ""
    """Which columns were read, for people."""


def read_texts(
    path: Path, text: str | None, other: str | None, *, trained: Sequence[str] = (), delimiter: str | None = None,
    skip_bad: bool = False, limit: int | None = None,
) -> Texts:  # fmt: skip
    """Return the texts of a file, or its pairs if the column `other` is named; raises DataError for what is bad.

    Without a name of its column, the text is in the one of `trained`, columns of the training, that the file has. Of a
    plain text file (.txt), each line that is not blank is a text.
    """
    bad, is_plain = BadRows(str(path), skip_bad=skip_bad), path.suffix.lower() == ".txt" and text is None and not other
    try:
        if is_plain:
            rows, name, read = _lines(text_of(read_bytes(path))), "text", "each line is a text"
            column = None
        else:
            table = read_table(path, delimiter)
            name = column = _text_column(table, text, other, trained)
            names = [name, *([other] if other else [])]
            rows = table.take(names)
            read = columns_line({"text": name} | ({"second text": other} if other else {}), table.not_read(names))
            gone = [one for one in trained if one not in map(str, table.columns)]
            if text is None and gone and name not in trained:
                read += f"; {without_columns(gone)}"
        found = _texts_of(rows, name, other, bad, limit)
    except Rejected as problem:
        raise problem.error(str(path)) from None
    n_lines = int(found.places[-1].removeprefix("line ")) if is_plain else 0
    n_blank = max(0, n_lines - len(found.texts) - found.left_out.n_rows)
    return replace(found, n_blank=n_blank, column=column, read=read)


def without_columns(gone: Sequence[str]) -> str:
    """Return for people that a file lacks these columns of the training."""
    return f"it has no {' or '.join(gone)}, which the training read"


def _lines(text: str) -> Iterator[PlacedRow]:
    for n, line in enumerate(io.StringIO(text, newline=None), start=1):  # str.splitlines also cuts at U+2028 and others
        if line.strip():
            yield f"line {n}", {"text": line.strip()}


def _text_column(rows: TableRows, named: str | None, other: str | None, trained: Sequence[str]) -> str:
    found = [str(name) for name in rows.columns]
    if missing := [name for name in (named, other) if name and name not in found]:
        raise Rejected(
            f"no column is named {' or '.join(missing)}",
            got=f"columns found: {', '.join(found) or 'none'}",
            why="an option names it, or the training of this model read it",
            fix="correct --text_column_names and --text_pair_column_names",
        )
    if named is not None:
        return named
    rest = [name for name in found if name != other]
    of_training = [name for name in dict.fromkeys(trained) if name in rest]
    if len(of_training) == 1:
        return of_training[0]
    texts = [name for name in rest if not _IDENTIFIER.fullmatch(name)]
    usual = [name for name in texts if name.lower() in TEXTS]
    if not of_training and (len(texts) == 1 or len(usual) == 1):
        return texts[0] if len(texts) == 1 else usual[0]
    raise Rejected(
        "it is not known which column holds the text",
        got=f"columns found: {', '.join(found) or 'none'}",
        why="the training read several of them"
        if of_training
        else "there are several, and not one alone has a usual name; in CSV the first line names the columns",
        fix="name it: --text_column_names NAME",
    )


def _texts_of(rows: Iterable[PlacedRow], name: str, other: str | None, bad: BadRows, limit: int | None) -> Texts:
    texts: list[str] = []
    others: list[str] = []
    places: list[str] = []
    for n, (place, row) in enumerate(rows):
        if n == limit:
            break
        try:
            row = object_of(row, '{"text": "..."}')
            text, second = text_field(row, name), text_field(row, other) if other else ""
        except Rejected as problem:
            bad.add(problem, lambda place=place: place)
            continue
        texts.append(text)
        others.append(second)
        places.append(place)
    bad.refuse(len(texts), "text")
    return Texts(texts, others if other else None, places, LeftOut.of(bad))
