"""What is wrong with the labels of a batch, or of the rows that it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers.utils.generic import find_labels

from whet.errors import DataError

_IGNORED = -100
_ROWS, _TOKENS, _WORDS = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"
_CHOICES = "ForMultipleChoice"
_NAMES = ("labels", "label", "label_ids")
"""Columns that transformers' collators hand on as `labels`."""


class UnknownLabel(DataError, IndexError):  # noqa: N818 - whoever caught torch's IndexError still does
    """A label that is none of the model's classes."""


def has_choices(model: Any) -> bool:
    """Return whether the model reads several sequences a row and chooses one."""
    return type(model).__name__.endswith(_CHOICES)


def odd_labels(model: Any, ids: Tensor, inputs: Mapping[str, Any]) -> DataError | None:
    """Return what about a batch's labels does not fit the model; None if nothing was found."""
    labels, head = inputs.get("labels"), type(model).__name__
    if not isinstance(labels, Tensor) or not head.endswith((_ROWS, _TOKENS, _WORDS, _CHOICES)):
        return None
    if head.endswith((_TOKENS, _WORDS)) and labels.shape != ids.shape:
        return DataError(
            what="the labels have another shape than the tokens",
            got=f"labels {tuple(labels.shape)}, input_ids {tuple(ids.shape)}",
            why=f"{head} learns one label for each token",
            fix=f"give each row as many labels as tokens, {_IGNORED} for those that do not count",
        )
    n_classes = _n_classes(model, ids)
    if head.endswith(_ROWS) and (n_classes == 1 or model.config.problem_type == "regression"):
        return _odd_numbers(labels, n_classes)
    if head.endswith(_ROWS) and _is_multi_label(model, labels):
        return _odd_several(labels, n_classes)
    if labels.is_floating_point():
        return _float_labels(labels, n_classes)
    return _odd_classes(head, labels, n_classes)


def _n_classes(model: Any, ids: Tensor) -> int:
    if has_choices(model):
        return ids.shape[1]
    return model.config.vocab_size if type(model).__name__.endswith(_WORDS) else model.config.num_labels


def _is_multi_label(model: Any, labels: Tensor) -> bool:
    """Return whether each class is judged on its own, or whether the labels look as if it should be."""
    if labels.dim() > 1:
        return labels.shape[1] > 1
    return model.config.problem_type == "multi_label_classification" and not labels.is_floating_point()


def _odd_numbers(labels: Tensor, n_numbers: int) -> DataError | None:
    if labels.numel() == labels.shape[0] * n_numbers:
        return None
    return DataError(
        what="the labels are not numbers to be predicted",
        got=f"{labels.dtype} {tuple(labels.shape)}",
        why=f"the model predicts {n_numbers} for each row (num_labels), as its problem_type is regression",
        fix=f"give each row {n_numbers}; for classes load the model with"
        " problem_type='single_label_classification' and their number in num_labels",
    )


def _odd_several(labels: Tensor, n_classes: int) -> DataError | None:
    if labels.is_floating_point() and labels.dim() == 2 and labels.shape[1] == n_classes:
        return None
    return DataError(
        what="the labels are not those of several classes at once",
        got=f"{labels.dtype} {tuple(labels.shape)}",
        why=f"a row with several labels has {n_classes} numbers (num_labels), each 0.0 or 1.0, as floats",
        fix="make them floats: [float(name in found) for name in names]; for one class a row give its number alone, and"
        " load the model with problem_type='single_label_classification'",
    )


def _odd_classes(head: str, labels: Tensor, n_classes: int) -> DataError | None:
    if (odd := outside(labels[labels != _IGNORED], n_classes)) is None:
        return None
    masked, choices = head.endswith(_WORDS), head.endswith(_CHOICES)
    named = "vocab_size" if masked else "sequences a row" if choices else "num_labels"
    return UnknownLabel(
        what="a label is none of the model's classes",
        got=f"label {odd}",
        why=f"{head} has {n_classes} classes ({named}), counted from 0; {_IGNORED} is left out of the loss",
        fix="number the choices of each row from 0" if choices else _labels_in_range(odd, masked=masked),
    )


def _labels_in_range(odd: int, *, masked: bool) -> str:
    if masked:
        return "use the model's own tokens as labels"
    if odd < 0:
        return f"number the labels from 0; {_IGNORED} marks those that do not count"
    return f"number the labels from 0, or load the model with from_pretrained(..., num_labels={odd + 1})"


def _float_labels(labels: Tensor, n_classes: int) -> DataError:
    return DataError(
        what="the labels are not classes",
        got=f"{labels.dtype} {tuple(labels.shape)}",
        why=f"the model has {n_classes} classes, and a label is the number of one",
        fix="make them whole numbers: int(label); for numbers to be predicted load the model with num_labels=1",
    )


def outside(found: Tensor, n: int) -> int | None:
    """Return the number that is furthest outside of 0 .. n - 1; None if none is."""
    if not found.numel():
        return None
    least, most = int(found.min()), int(found.max())
    return most if most >= n else least if least < 0 else None


def missing(model: Any, rows: Sequence[Any], inputs: Mapping[str, Any]) -> DataError | None:
    """Return why a batch of these rows has no labels for the model's loss; None if it has, or nobody knows."""
    wanted = find_labels(type(model))
    if not wanted or any(name in inputs for name in wanted) or not rows or not isinstance(rows[0], Mapping):
        return None
    row = rows[0]
    given = [name for name in (*wanted, *_NAMES) if name in row]
    for name in given:
        if is_text(row[name]):
            return text(name, row[name], getattr(getattr(model, "config", None), "label2id", None))
    others = [name for name in row if name not in inputs and not is_text(row[name])]
    return DataError(
        what=f"the rows have no {' and '.join(wanted)}",
        got=f"{given[0]} None" if given else f"columns {', '.join(sorted(row)) or 'none'}",
        why=f"{type(model).__name__} computes its loss from the column {' and '.join(wanted)}",
        fix=_labels_from_words(model)
        or (
            f"give the column that holds them this name: dataset.rename_column({others[0]!r}, {wanted[0]!r})"
            if others and not given
            else f"add the column {wanted[0]} to each row, such as {{'input_ids': [...], {wanted[0]!r}: 0}}"
        ),
    )


def _labels_from_words(model: Any) -> str | None:
    """Return how a language model gets labels, which are its own words; None for other models."""
    name = type(model).__name__
    masked, causal = name.endswith("ForMaskedLM"), name.endswith(("ForCausalLM", "LMHeadModel"))
    if not masked and not causal:
        return None
    return f"pass data_collator=DataCollatorForLanguageModeling(tokenizer, mlm={masked}), which makes them of the words"


def text(name: str, value: Any, label2id: Mapping[str, int] | None = None) -> DataError:
    """Return the error for a column that holds text."""
    return DataError(
        what=f"the column {name} holds text",
        got=value,
        why="a batch is made of numbers: token ids, and labels counted from 0",
        fix=_numbered(name, value, label2id)
        if "label" in name
        else "tokenise the data set first, or give a data_collator that does",
    )


def _numbered(name: str, value: Any, label2id: Mapping[str, int] | None) -> str:
    one = value if isinstance(value, str) else np.asarray(value, dtype=object).flat[0]
    if label2id and one in label2id:
        own = f"model.config.label2id[row[{name!r}]]"
        each = f"[model.config.label2id[one] for one in row[{name!r}]]"
        return f"number the labels as the model does: row[{name!r}] = {own if one is value else each}"
    return (
        f"number the labels: row[{name!r}] = names.index(row[{name!r}]) with the list names of all labels,"
        f" or dataset.class_encode_column({name!r})"
    )


def is_text(value: Any) -> bool:
    """Return whether a cell is text, or a list of texts."""
    cells = np.asarray(value, dtype=object)
    return cells.size > 0 and isinstance(cells.flat[0], str)
