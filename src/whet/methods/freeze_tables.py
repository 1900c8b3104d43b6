"""Embedding tables that are not trained: most weights of a small encoder, and no gradient and no moments for them."""

from __future__ import annotations

from torch import nn

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.view import ModelView

CARD = Card(
    name="freeze_tables",
    asked_by="methods",
    does="Embedding tables keep their values, without gradient or optimizer state.",
    improves="both",
    same_result="no",
    hurts="When the texts use words that pretraining has hardly seen.",
    source="Lee, Tang and Lin 2019, arXiv:1911.03090, section 3",
)
STAGE = Stage.WEIGHTS
_MOMENTS_BYTES = 8
"""Of a weight, with AdamW: two float32 numbers."""


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Stop the training of all embedding tables. Raises ConfigError for a model without one."""
    if CARD.name not in settings.names:
        return None
    restore(view)
    tables = _trained(view)
    if not tables:
        raise ConfigError(
            what="freeze_tables finds no embedding table that is trained",
            got=type(view.model).__name__,
            why="it stops the training of the model's embedding tables",
            fix="leave freeze_tables out of --methods",
        )
    for weight in tables:
        weight.requires_grad_(False)
    record.keep(view.model, CARD.name, tables)
    return Applied(CARD.name, f"{sum(weight.numel() for weight in tables)} weights of embedding tables are not trained")


def restore(view: ModelView) -> None:
    """Train the tables again that `apply` stopped."""
    for weight in record.take(view.model, CARD.name) or ():
        weight.requires_grad_(True)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return the gradients and moments of the tables, which are saved."""
    if CARD.name not in settings.names:
        return Cost()
    n_weights = sum(weight.numel() for weight in _trained(view))
    return Cost(gradient_bytes=-4 * n_weights, optimizer_bytes=-_MOMENTS_BYTES * n_weights)


def _trained(view: ModelView) -> list[nn.Parameter]:
    """Return the tables that are trained, each once."""
    weights = [table.weight for _, table in view.tables() if isinstance(table, nn.Embedding)]
    return [weight for weight in dict.fromkeys(weights) if isinstance(weight, nn.Parameter) and weight.requires_grad]
