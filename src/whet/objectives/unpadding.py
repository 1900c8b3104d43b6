"""Batches of any collator, padded or with several sequences in a row, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.data import sequences
from whet.data.batch import HOLES, Batch, filled_length, has_holes
from whet.models.packed import PackedModel
from whet.objectives.base import IGNORED

_IDS = (torch.int64, torch.int32)
_TOKENS = ("attention_mask", "token_type_ids", "position_ids")
_READ = ("input_ids", *_TOKENS, *sequences.COLUMNS, "labels", "next_sentence_label")
"""The columns that a packed pass can honour."""


def why_padded(inputs: Mapping[str, Any], *, first_tokens: bool, causal: bool) -> str | None:
    """Return why a collated batch has to run with its padding; None if it need not.

    `first_tokens`: the head reads each row's first place, which then has to be a token. `causal`: it is a decoder's.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not (isinstance(ids, Tensor) and ids.dim() in (2, 3) and ids.dtype in _IDS and ids.numel()):
        return "batches without input_ids (rows, places)"
    other = [name for name, value in inputs.items() if name not in _READ and value is not None]
    if other:
        return f"batches with {', '.join(other)}"
    shaped = [inputs.get(name) for name in _TOKENS]
    if any(value is not None and not (isinstance(value, Tensor) and value.shape == ids.shape) for value in shaped):
        return "batches whose columns differ in shape from input_ids"
    if first_tokens and _sequences(inputs, causal=causal) is not None:
        return "rows with several sequences, of which the head reads the first token of the first"
    if mask is None:
        return None
    if (named := sequences.names_sequences(inputs)) and not bool(mask.all()):
        return f"batches with {', '.join(named)} and padding in attention_mask: give one of the two"
    real = mask.bool().flatten(0, -2)
    if first_tokens and not bool(real[:, 0].all()):
        return "rows that do not begin with a token: pad them on the right"
    if not bool(real.any(1).all()):
        return "rows without a token"
    if has_holes(real):
        return HOLES
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask.shape and bool(((labels != IGNORED) & ~mask.bool()).any()):
        return "rows with labels at padding tokens: set these to -100"
    return None


def _sequences(inputs: Mapping[str, Any], *, causal: bool) -> Tensor | None:
    """Return which tokens begin a sequence, if rows hold several; as in transformers' Trainer, there is no cache."""
    if inputs["input_ids"].dim() != 2:
        return None
    return sequences.first_tokens(inputs, by_position=causal and inputs.get("attention_mask") is None)


def without_padding(batch: Batch, *, causal: bool) -> Batch:
    """Return the batch with the layout of its tokens end to end; its inputs stay as the collator made them.

    Of several sequences in one row, as in multiple choice or as `sequences.first_tokens` finds them, each is one of its
    own in `cu_seqlens`. `causal`: the model is a decoder.
    """
    ids = batch.inputs["input_ids"]
    longest = ids.shape[-1]
    mask = batch.inputs.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    places = real.flatten().nonzero()[:, 0]
    if (first_tokens := _sequences(batch.inputs, causal=causal)) is None:
        lengths, positions = real.flatten(0, -2).sum(1), places % longest
    else:
        starts = first_tokens.flatten().nonzero()[:, 0]
        lengths = starts.diff(append=starts.new_tensor([len(places)]))
        positions = places - starts.repeat_interleave(lengths)
    n_more = filled_length(len(places)) - len(places)
    return replace(
        batch,
        n_tokens=len(places),
        n_computed=len(places) + n_more,
        cu_seqlens=nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        positions=nn.functional.pad(positions.int(), (0, n_more)),
        max_seqlen=int(lengths.max()),
        columns=torch.cat([places, places[:n_more]]),
    )


def packed_columns(batch: Batch, packed: PackedModel, names: frozenset[str]) -> dict[str, Tensor]:
    """Return what the encoder reads of a batch: these columns and the positions of its tokens, each (1, N)."""
    assert batch.columns is not None
    columns = {name: batch.inputs[name] for name in names if batch.inputs.get(name) is not None}
    given = batch.inputs.get("position_ids")
    ids = batch.inputs["input_ids"].flatten(0, -2)
    columns["position_ids"] = packed.family.padded_positions(packed.module, ids) if given is None else given
    return {name: column.flatten()[batch.columns].long()[None] for name, column in columns.items()}
