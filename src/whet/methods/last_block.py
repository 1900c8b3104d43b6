"""A last block that computes only the tokens whose hidden states the head reads."""

from __future__ import annotations

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.methods import fuse
from whet.methods.seam import Applied, Cost, Stage
from whet.models import last_block
from whet.models.packed import packed_model
from whet.models.view import ModelView
from whet.objectives import heads

CARD = Card(
    name="last block",
    asked_by="last_block_tokens",
    does="The last block computes only the tokens that the head reads, and all keys and values.",
    improves="both",
    same_result="yes",
    hurts="Never so far; hooks, and heads that read all tokens, turn it off.",
    source="the chain rule: a state that nobody reads has no gradient",
    wanted_by="last_block=read",
    page="speed.md#the-last-block",
)
STAGE = Stage.CALLS


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Let passes leave tokens out of the last block, if whet's operators run it and what reads it may not need all.

    Each pass says which tokens are read, and checks that nobody watches the last block.
    """
    packed = packed_model(view.model)
    if settings.last_block != "read" or packed is None or fuse.changed_in(view.model) is None:
        return None
    is_known = bool(settings.pooled) or heads.reads_beside(view.model) is not None
    if not is_known or not last_block.switch_on(packed):
        return None
    return Applied(CARD.name, "computes the tokens that the head reads, if not all")


def restore(view: ModelView) -> None:
    """Compute all tokens again."""
    last_block.switch_off(view.model)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: what a pass saves depends on how many tokens the head reads, and none may be left out."""
    return Cost()
