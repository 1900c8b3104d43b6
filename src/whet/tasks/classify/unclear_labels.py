"""Training labels whose look speaks for another kind of task than whet would choose for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from whet.errors import DataError
from whet.tasks.classify.examples import Examples

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
