"""Batches that a collator pads: how they are counted, widened and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.data.padding import Padding
from whet.data.store import RowStore
from whet.kernels import random
from whet.models.adapters import unwrapped
from whet.models.packed import explained
from whet.objectives.base import Collate


def seed_torch(seed: int, step: int, first_slot: int) -> None:
    """Set torch's generator from the place in the run: a resumed run draws the same masks."""
    random.seed_torch(random.stream_key(seed, step, first_slot))


def run_seeded(model: nn.Module, batch: Batch, seed: int, step: int) -> Any:
    """Run the model with torch's generator set from the place in the run: a resumed run draws the same masks."""
    seed_torch(seed, step, batch.first_slot)
    with explained(model, batch.inputs), without_cache(model):
        return model(**batch.inputs)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch `config.use_cache` off, as transformers' Trainer does, for calls that nobody continues.

    With a cache transformers' decoders do not look for sequences whose positions restart in a row.
    """
    config = getattr(unwrapped(model), "config", None)
    if not getattr(config, "use_cache", False):
        yield
        return
    setattr(config, "use_cache", False)  # noqa: B010 - configurations declare no such attribute
    try:
        yield
    finally:
        setattr(config, "use_cache", True)  # noqa: B010


def collated(collate: Collate, rows: list[Any], first_slot: int, label_names: Sequence[str]) -> Batch:
    """Return the rows as the collator makes a batch of them, the named columns among its labels."""
    inputs = dict(collate(rows))
    labels = {name: inputs.pop(name) for name in label_names if name in inputs}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    n_computed = tokens.numel() if isinstance(tokens, Tensor) else 0
    return Batch(
        inputs=inputs,
        labels=labels,
        n_rows=len(rows),
        first_slot=first_slot,
        n_tokens=int(mask.sum()) if isinstance(mask, Tensor) else n_computed,
        n_computed=n_computed,
        n_padded=n_computed,
    )


def real_places(batch: Batch) -> Tensor:
    """Return which places of a padded batch are tokens; rows of one length may come without a mask."""
    mask = batch.inputs.get("attention_mask")
    return torch.ones_like(batch.inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def widened(batch: Batch, rows: RowStore, padding: Padding, padded_to: np.ndarray | None) -> Batch:
    """Return a padded micro-batch with as much padding as its rows have in the batch that it is a part of."""
    if padded_to is None:
        padded_to = padding.lengths(rows.lengths_with_padding, len(rows))
    ids = batch.inputs["input_ids"]
    inputs = {"attention_mask": torch.ones_like(ids), **batch.inputs}
    more = max(int(padded_to.max()) - ids.shape[1], 0)
    wide = {
        name: nn.functional.pad(value, (0, more), value=padding.fill(name)) if value.shape == ids.shape else value
        for name, value in inputs.items()
    }
    return replace(batch, inputs=wide, n_computed=wide["input_ids"].numel(), n_padded=wide["input_ids"].numel())
