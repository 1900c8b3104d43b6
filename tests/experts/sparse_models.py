"""Tiny models with experts, and runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine
import whet
from tiny import arguments, tiny_model, tiny_rows
from tiny_decoders import tiny_decoder, token_rows, trainer_of
from whet.models.known import known

SPARSE_FAMILIES = tuple(name for name, family in known().items() if family.feed_forward is not None)
"""Every family whose feed-forward parts may get experts."""


def dense_model(family: str, *, dropout: float = 0.0) -> Any:
    """Return a tiny dense model of the family: a decoder, or an encoder that answers questions."""
    return (tiny_decoder if known()[family].causal else tiny_model)(family, dropout=dropout)


def sparse_model(family: str, *, dropout: float = 0.0, **settings: Any) -> Any:
    """Return the same model with four experts in its second block, unless told otherwise."""
    return whet.upcycle(dense_model(family, dropout=dropout), whet.ExpertSettings(**({"experts": 4} | settings)))


def trainer(folder: Path, model: Any, *, n_rows: int = 16, **settings: Any) -> Any:
    """Return a trainer whose batches run packed."""
    family = model.config.model_type
    if known()[family].causal:
        return trainer_of(folder, model, token_rows(n_rows), **settings)
    return engine.Trainer(model, arguments(folder, **settings), train_dataset=tiny_rows(n_rows, family))


def logged(found: Any, name: str) -> list[float]:
    """Return what each step of a run logged under this name."""
    return [entry[name] for entry in found.state.log_history if name in entry]
