"""The balance loss that models of transformers with experts add to their own loss (`output_router_logits`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whet.errors import ConfigError
from whet.models.adapters import unwrapped


def is_asked_for(model: Any) -> bool:
    """Return whether the configuration asks for the balance loss, and the model has one."""
    return bool(getattr(model.config, "output_router_logits", False)) and _function(model) is not None


def require_none(model: Any, loss: str) -> None:
    """Refuse a model that asks for the balance loss in a run whose loss does not contain it."""
    if is_asked_for(unwrapped(model)):
        raise ConfigError(
            what=f"{loss} does not contain the balance loss of the experts",
            got=f"{type(unwrapped(model)).__name__} with output_router_logits",
            why="its configuration adds that loss to the loss of the next tokens",
            fix='set "output_router_logits": false in its config.json, or use a model without experts',
        )


def router_loss(model: Any, router_logits: Sequence[Tensor], n_tokens: int) -> Tensor:
    """Return the balance loss () of the first n_tokens tokens, by the function of the model's own module.

    As in transformers it is that of a micro-batch, over its layers together.
    """
    logits = tuple(one[:n_tokens].float() for one in router_logits)
    return _function(model)(logits, model.num_experts, model.num_experts_per_tok)


def _function(model: Any) -> Any:
    return getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
