"""What labels are (one class, several classes, a number), their order, and their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whet.data.files.bad_rows import MAX_SHOWN
from whet.errors import DataError, Problem
from whet.tasks.classify.arguments import ProblemType
from whet.tasks.classify.examples import Examples

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

    def knows_all(self, examples: Examples) -> bool:
        """Return whether every example has a label of this scheme."""
        if examples.labels is None or any(label is None for label in examples.labels):
            return False
        index = {name: n for n, name in enumerate(self.names)}
        try:
            for label in examples.labels:
                self._number(label, index)
        except ValueError:
            return False
        return True

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


def require_several(examples: Examples, scheme: Scheme) -> None:
    """Raise DataError if all examples have the same label: any model would be right, and none would learn."""
    of_examples = sorted({text_of(label) for label in examples.labels or ()})
    several = scheme.names if examples.label_order else of_examples
    if scheme.kind != "single_label_classification" or len(several) > 1:
        return
    raise DataError(
        what=f"{examples.source}: all examples have the same label",
        got=f"{examples.columns.label}: {several[0]}" if several else "no label",
        why="a classifier learns to tell labels apart",
        fix="add examples of other labels, or name another column: --label_column_name NAME",
    )


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
    """Return the labels of a row with several: a list, or in CSV a list as JSON text; one label is a list of one."""
    if isinstance(label, list):
        return label
    if _is_json_list(label):
        return json.loads(label)
    return [label]


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
    return _first(labels, lambda label: isinstance(label, list) and len({str(one) for one in label}) < len(label))


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
