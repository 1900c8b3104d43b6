"""Experts of transformers' own models with one native product for each expert."""

from __future__ import annotations

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.methods import fuse
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.experts import native
from whet.models.view import ModelView

CARD = Card(
    name="grouped experts",
    asked_by="default",
    does="The experts of Mixtral and its like multiply their tokens in one product each, as those of --moe_experts do.",
    improves="speed",
    same_result="yes",
    hurts="Never so far; WHET_KERNELS=reference turns them off.",
    source="Gale et al. 2022, arXiv:2211.15841",
)
STAGE = Stage.OPERATORS


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Let the experts of a packed model on the CPU run in whet's grouped products."""
    model = view.model
    if not fuse.would_run(view, settings) or not (found := native.experts_of(model)):
        return None
    native.register()
    record.keep(model, CARD.name, model.get_experts_implementation())
    model.set_experts_implementation(native.NAME)
    return Applied(CARD.name, f"{len(found)} layers of experts")


def restore(view: ModelView) -> None:
    """Give the model its own implementation again."""
    before = record.take(view.model, CARD.name)
    if before is not None:
        view.model.set_experts_implementation(before)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: the same products, without copies of weights."""
    return Cost()
