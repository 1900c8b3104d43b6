"""Why a model failed on a batch: looked for after the failure, so that a batch that is right costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.errors import ConfigError, DataError, WhetError
from whet.log import logger
from whet.models import bad_labels
from whet.models.packable import family_of
from whet.models.wrapped import unwrapped

_FAILURES = (IndexError, ValueError, RuntimeError, TypeError)
"""What torch and transformers raise for a batch that does not fit the model."""


class OutsideOfTable(DataError, IndexError):  # noqa: N818 - whoever caught torch's IndexError still does
    """An id or a position for which the model has no embedding."""


@contextmanager
def explained(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Raise DataError in place of the model's own error where the batch's columns do not fit the model.

    ConfigError if its code does not run under autocast.
    """
    try:
        yield
    except _FAILURES as error:
        found = None if isinstance(error, WhetError) else _found_for(error, model, inputs)
        if found is None:
            raise
        raise found from error


def _found_for(error: Exception, model: nn.Module, inputs: Mapping[str, Any]) -> WhetError | None:
    """Return what explains the error; None if nothing does, or if a model of a user's own cannot be looked at."""
    try:
        return problem_of(unwrapped(model), inputs) or _overflow_of(error)
    except Exception as failed:
        logger.debug("no explanation of the model's error: %s: %s", type(failed).__name__, failed)
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


def problem_of(model: nn.Module, inputs: Mapping[str, Any]) -> DataError | None:
    """Return what about the batch does not fit the model; None if nothing was found."""
    if not isinstance(model, PreTrainedModel) or model.main_input_name != "input_ids":
        return None
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return None if inputs.get("inputs_embeds") is not None else _no_ids(inputs)
    checks = (_odd_ids, _odd_tokens, _odd_segments, _too_long, bad_labels.odd_labels)
    return next((found for check in checks if (found := check(model, ids, inputs)) is not None), None)


def _no_ids(inputs: Mapping[str, Any]) -> DataError:
    return DataError(
        what="the rows hold no input_ids",
        got=f"columns that the model reads: {', '.join(sorted(inputs)) or 'none'}",
        why="the model reads token ids, and nothing has tokenised the text of these rows",
        fix="tokenise the data set first: dataset.map(lambda row: tokenizer(row['text'], truncation=True))",
    )


def _odd_ids(model: Any, ids: Tensor, _: Any) -> DataError | None:
    if ids.dim() == (3 if bad_labels.has_choices(model) else 2) and ids.numel() and not ids.is_floating_point():
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
    if n_tokens is None or (odd := bad_labels.outside(ids, n_tokens)) is None:
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
    if not n_types or not isinstance(types, Tensor) or (odd := bad_labels.outside(types, n_types)) is None:
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
    last = int(positions.max()) if isinstance(positions, Tensor) else first + ids.shape[-1] - 1
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


def checked(collate: Callable[[list[Any]], Any], model: Any = None) -> Callable[[list[Any]], Any]:
    """Return the collator, with DataError in place of its own error if it cannot make a batch of such rows.

    The numbers that `model` gives its labels are named in the error.
    """

    def collate_or_explain(rows: list[Any]) -> Any:
        try:
            return collate(rows)
        except (*_FAILURES, KeyError, AttributeError) as error:
            found = None if isinstance(error, WhetError) else _problem_of_rows(rows, model)
            if found is None:
                raise
            raise found from error

    return collate_or_explain


def _problem_of_rows(rows: Sequence[Any], model: Any) -> DataError | None:
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
    text = {name: value for row in named for name, value in row.items() if bad_labels.is_text(value)}
    if text:
        name, value = next(iter(text.items()))
        return bad_labels.text(name, value, getattr(getattr(model, "config", None), "label2id", None))
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
