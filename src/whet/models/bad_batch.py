"""Why a model failed on a batch: its ids, its labels, or the rows that it was made of do not fit the model.

Most of it is looked for, and this file imported, after the failure (`explained` and `checked` of `packed.py`): a batch
that is right costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import find_labels

from whet.errors import ConfigError, DataError, WhetError
from whet.log import logger
from whet.models.adapters import unwrapped
from whet.models.packable import family_of
from whet.on_host import at_hand, on_host


class OutsideOfTable(DataError, IndexError):  # noqa: N818 - whoever caught torch's IndexError still does
    """An id or a position for which the model has no embedding."""


def explanation_of(
    error: Exception, model: nn.Module, inputs: Mapping[str, Any], places: Tensor | None = None
) -> WhetError | None:
    """Return what explains the error; None if nothing does, or if a model of a user's own cannot be looked at.

    `places` (N,) are those of the flattened batch whose tokens are computed; None: all are.
    """
    try:
        return problem_of(unwrapped(model), inputs, places) or _overflow_of(error)
    except Exception as failed:
        logger.debug("no explanation of the model's error: %s: %s", type(failed).__name__, failed)
        return None


def outside_of_tables(model: nn.Module, inputs: Mapping[str, Any], places: Tensor | None = None) -> DataError | None:
    """Return which id of the batch the model has no embedding for, of those that the host knows; None if none is.

    `places` is as in `explanation_of`.
    """
    known = {
        name: values
        for name in _IDS
        if isinstance(column := inputs.get(name), Tensor) and (values := at_hand(column)) is not None
    }
    computed = None if places is None else at_hand(places)
    if "input_ids" not in known or (places is not None and computed is None):
        return None
    try:
        known = known if computed is None else _at(computed, known)
        base, ids = unwrapped(model), known["input_ids"]
        if not isinstance(base, PreTrainedModel) or base.main_input_name != "input_ids":
            return None
        return _odd_tokens(base, ids, known) or _odd_segments(base, ids, known)
    except Exception as failed:  # a model of a user's own, whose tables cannot be looked at
        logger.debug("ids were not looked at: %s: %s", type(failed).__name__, failed)
        return None


def _overflow_of(error: Exception) -> WhetError | None:
    """Return what to do about a constant of fp32, such as a mask's, that autocast's 16 bits cannot hold."""
    if not torch.is_autocast_enabled("cpu") or "without overflow" not in str(error):
        return None
    return ConfigError(
        what="the model's own code fails under autocast in 16 bits",
        got=str(error),
        why="it writes the smallest number of fp32, which masks hidden tokens, into scores of 16 bits",
        fix="train in fp32 (--bf16 false, --precision fp32); or leave --attn_implementation out, if whet has a family"
        " for the model: its own attention runs in bf16",
    )


_IDS = ("input_ids", "token_type_ids")
"""Columns that are read from tables."""


def _at(places: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what columns have at these places of the batch, all on the host. A row of types may stand for all rows."""
    shape = columns["input_ids"].shape
    return {name: column.expand(shape).flatten()[places] for name, column in columns.items()}


def problem_of(model: nn.Module, inputs: Mapping[str, Any], places: Tensor | None = None) -> DataError | None:
    """Return what about the batch does not fit the model; None if nothing was found.

    `places` is as in `explanation_of`.
    """
    if not isinstance(model, PreTrainedModel) or model.main_input_name != "input_ids":
        return None
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return None if inputs.get("inputs_embeds") is not None else _no_ids(inputs)
    if (odd := _odd_ids(model, ids, inputs)) is not None:
        return odd
    read: Mapping[str, Any] = inputs
    if places is not None:
        read = _at(on_host(places), {name: on_host(inputs[name]) for name in _IDS if inputs.get(name) is not None})
    if (odd := _odd_tokens(model, read["input_ids"], read) or _odd_segments(model, ids, read)) is not None:
        return odd
    return _too_long(model, ids, inputs) or odd_labels(model, ids, inputs)


def _no_ids(inputs: Mapping[str, Any]) -> DataError:
    return DataError(
        what="the rows hold no input_ids",
        got=f"columns that the model reads: {', '.join(sorted(inputs)) or 'none'}",
        why="the model reads token ids, and nothing has tokenised the text of these rows",
        fix="tokenise the data set first: dataset.map(lambda row: tokenizer(row['text'], truncation=True))",
    )


def _odd_ids(model: Any, ids: Tensor, _: Any) -> DataError | None:
    if ids.dim() == (3 if has_choices(model) else 2) and ids.numel() and not ids.is_floating_point():
        return None
    return DataError(
        what="input_ids are not token ids",
        got=f"{ids.dtype} {tuple(ids.shape)}",
        why="a batch has one whole number for each token, and at least one token in each row",
        fix="take empty rows out of the data set, and give the tokenizer's own input_ids",
    )


def _odd_tokens(model: Any, ids: Tensor, _: Any) -> DataError | None:
    try:
        n_tokens = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # a model of a user's own, which names no table
        return None
    if n_tokens is None or (odd := out_of_range(ids, n_tokens)) is None:
        return None
    return OutsideOfTable(
        what="the model has no embedding for a token of the batch",
        got=f"input_ids {odd}",
        why=f"it knows {n_tokens:,} tokens (vocab_size), counted from 0",
        fix="use the tokenizer that belongs to the model; for tokens of your own call"
        " model.resize_token_embeddings(len(tokenizer))",
    )


def _odd_segments(model: Any, _: Tensor, inputs: Mapping[str, Any]) -> DataError | None:
    types, n_types = inputs.get("token_type_ids"), getattr(model.config, "type_vocab_size", None)
    if not n_types or not isinstance(types, Tensor) or (odd := out_of_range(types, n_types)) is None:
        return None
    return OutsideOfTable(
        what="the model has no embedding for a token type of the batch",
        got=f"token_type_ids {odd}",
        why=f"it knows {n_types} token types (type_vocab_size), counted from 0",
        fix="leave the column token_type_ids out, or give the tokenizer's own",
    )


def _too_long(model: Any, ids: Tensor, inputs: Mapping[str, Any]) -> DataError | None:
    n_positions = getattr(model.config, "max_position_embeddings", None) or 0
    family = family_of(model)
    if n_positions <= 0 or family is None:
        return None
    positions, first = inputs.get("position_ids"), family.first_position(model)
    last = int(on_host(positions).max()) if isinstance(positions, Tensor) else first + ids.shape[-1] - 1
    if last < n_positions:
        return None
    most = n_positions - first
    return OutsideOfTable(
        what="a sequence is longer than the model can read",
        got=f"{last - first + 1} tokens",
        why=f"the model has positions for {most} tokens (max_position_embeddings {n_positions}"
        + (f", of which the first {first} are for padding)" if first else ")"),
        fix=f"cut them: tokenizer(..., truncation=True, max_length={most}), or --max_seq_length {most} in whet qa",
    )


def problem_of_rows(rows: Sequence[Any], model: Any) -> DataError | None:
    """Return what about the rows cannot become tensors; None if nothing was found."""
    odd = next((row for row in rows if not isinstance(row, Mapping) and not hasattr(row, "__dict__")), None)
    if odd is not None:
        return DataError(
            what="a row of the data set has no named columns",
            got=odd,
            why="a model is called with a row's columns by name",
            fix="give rows as dicts, such as {'input_ids': [...], 'labels': 0}, or a data_collator of your own",
        )
    named = [row for row in rows if isinstance(row, Mapping)]
    text = {name: value for row in named for name, value in row.items() if is_text(value)}
    if text:
        name, value = next(iter(text.items()))
        return text_column(name, value, getattr(getattr(model, "config", None), "label2id", None))
    if any("input_ids" in row or "inputs_embeds" in row for row in named) or not named:
        return _problem_of_lengths(named, model)
    return _no_ids(named[0])


def _problem_of_lengths(rows: Sequence[Mapping[str, Any]], model: Any) -> DataError | None:
    """Return the error of labels for each token that a collator does not pad; None if they need no padding."""
    found = {len(row["labels"]) for row in rows if isinstance(row.get("labels"), list)}
    if len(found) < 2:
        return None
    is_tagger = type(model).__name__.endswith("ForTokenClassification")
    collator = "DataCollatorForTokenClassification(tokenizer)" if is_tagger else "DataCollatorForSeq2Seq(tokenizer)"
    return DataError(
        what="the labels of a batch's rows have different lengths",
        got=f"labels of {min(found)} and of {max(found)} tokens",
        why="the data_collator pads input_ids and leaves the labels as they are",
        fix=f"pass data_collator={collator}, which pads both",
    )


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
    found = on_host(labels)
    if (odd := out_of_range(found[found != _IGNORED], n_classes)) is None:
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


def out_of_range(found: Tensor, n: int) -> int | None:
    """Return the number that is furthest outside of 0 .. n - 1; None if none is."""
    if not found.numel():
        return None
    found = on_host(found)
    least, most = int(found.min()), int(found.max())
    return most if most >= n else least if least < 0 else None


def missing_labels(model: Any, rows: Sequence[Any], inputs: Mapping[str, Any]) -> DataError | None:
    """Return why a batch of these rows has no labels for the model's loss; None if it has, or nobody knows."""
    wanted = find_labels(type(model))
    if not wanted or any(name in inputs for name in wanted) or not rows or not isinstance(rows[0], Mapping):
        return None
    row = rows[0]
    given = [name for name in (*wanted, *_NAMES) if name in row]
    for name in given:
        if is_text(row[name]):
            return text_column(name, row[name], getattr(getattr(model, "config", None), "label2id", None))
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


def text_column(name: str, value: Any, label2id: Mapping[str, int] | None = None) -> DataError:
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
