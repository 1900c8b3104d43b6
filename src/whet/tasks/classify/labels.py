"""What labels are (one class, several classes, a number), their order, and their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.data.files.bad_rows import MAX_SHOWN
from whet.errors import DataError, Problem
from whet.tasks.classify.examples import Examples
from whet.tasks.classify.fields import ProblemType

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_FRACTION = re.compile(r".*[.eE].*", re.DOTALL)
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class Scheme:
    """What labels are, and the classes in the order of the model's logits; none for regression."""

    kind: ProblemType
    names: tuple[str, ...] = ()

    @property
    def n_logits(self) -> int:
        """How many numbers the model gives for each text."""
        return 1 if self.kind == "regression" else len(self.names)

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
                    problems.append(self._unknown(examples, row, str(error)))
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

    def _unknown(self, examples: Examples, row: int, why: str) -> Problem:
        assert examples.labels is not None
        shown = ", ".join(self.names[:_SHOWN_NAMES]) + (", ..." if len(self.names) > _SHOWN_NAMES else "")
        if self.kind == "regression":
            rule = "regression learns numbers"
            fix = "correct the value; if labels are classes: --do_regression false, without --problem_type regression"
        elif isinstance(examples.labels[row], list) and self.kind == "single_label_classification":
            rule = "problem_type single_label_classification learns one label for each text"
            fix = "leave --problem_type out, or give each row one label"
        else:
            rule, fix = f"the model knows {len(self.names)} labels: {shown}", "correct the label, or train with it"
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
    """Return the scheme of the training examples: classes as texts, sorted, as run_classification.py orders them.

    A data set of the hub that names its classes gives their order itself.
    """
    assert examples.labels is not None
    if kind == "regression":
        return Scheme(kind)
    several = kind == "multi_label_classification"
    names = {text_of(one) for label in examples.labels for one in (as_list(label) if several else [label])}
    ordered = [name for name in examples.label_order if names] if names <= set(examples.label_order) else sorted(names)
    return Scheme(kind, tuple(ordered))


def require_several(examples: Examples, scheme: Scheme) -> None:
    """Raise DataError if all examples have the same label: any model would be right, and none would learn."""
    if scheme.kind != "single_label_classification" or len(scheme.names) > 1:
        return
    raise DataError(
        what=f"{examples.source}: all examples have the same label",
        got=f"{examples.columns.label}: {scheme.names[0]}" if scheme.names else "no label",
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
