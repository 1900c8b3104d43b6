"""The lower part of a model that is not trained: its embeddings and first blocks, which run as in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.forwards import bind
from whet.models.view import ModelView

CARD = Card(
    name="freeze_layers",
    asked_by="freeze_layers",
    does="Embeddings and first blocks keep their values, without dropout, gradient or optimizer state.",
    improves="both",
    same_result="no",
    hurts="When the task is far from what the model was pretrained on.",
    source="Lee, Tang and Lin 2019, arXiv:1911.03090",
    wanted_by="freeze_layers",
)
STAGE = Stage.WEIGHTS
_MOMENTS_BYTES = 8
"""Of a weight, with AdamW: two float32 numbers."""


@dataclass
class _State:
    weights: list[nn.Parameter] = field(default_factory=list)
    """Those that were trained before."""
    modules: list[nn.Module] = field(default_factory=list)
    """Those that stay in evaluation mode."""


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Stop the training of the embeddings and the first blocks, and their dropout.

    Raises ConfigError for a model whose blocks are not known, or with fewer blocks.
    """
    if settings.freeze_layers is None:
        return None
    restore(view)
    n_blocks = len(view.blocks())
    if not view.depths() or settings.freeze_layers > n_blocks:
        raise ConfigError(
            what=f"freeze_layers {settings.freeze_layers} does not fit the model",
            got=f"{type(view.model).__name__} with {n_blocks} blocks",
            why="it freezes the embeddings and this many blocks of one stack, each with weights of its own",
            fix=f"use a --freeze_layers up to {n_blocks}, or leave it out",
        )
    state = _State(_trained(view, settings.freeze_layers), list(_lower(view, settings.freeze_layers)))
    for weight in state.weights:
        weight.requires_grad_(False)
    for module in state.modules:
        setattr(module, "train", bind(_as_in_evaluations, module))  # noqa: B010
        module.eval()
    record.keep(view.model, CARD.name, state)
    n_weights = sum(weight.numel() for weight in state.weights)
    blocks = f"and the first {settings.freeze_layers} of {n_blocks} blocks " if settings.freeze_layers else ""
    return Applied(CARD.name, f"the embeddings {blocks}are not trained and drop nothing, {n_weights} weights")


def restore(view: ModelView) -> None:
    """Train again what `apply` stopped."""
    state: _State | None = record.take(view.model, CARD.name)
    if state is None:
        return
    for weight in state.weights:
        weight.requires_grad_(True)
    for module in state.modules:
        module.__dict__.pop("train", None)
        module.train(view.model.training)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return the gradients and moments of these weights, which are saved."""
    if settings.freeze_layers is None:
        return Cost()
    n_weights = sum(weight.numel() for weight in _trained(view, settings.freeze_layers))
    return Cost(gradient_bytes=-4 * n_weights, optimizer_bytes=-_MOMENTS_BYTES * n_weights)


def _as_in_evaluations(self: Any, mode: bool = True) -> Any:
    """Stand in for the module's `train`: whatever is asked for, it stays in evaluation mode."""
    return type(self).train(self, False)


def _trained(view: ModelView, n_blocks: int) -> list[nn.Parameter]:
    """Return the weights of the lower part that are trained, each once."""
    depths = view.depths()
    return [weight for weight in view.root.parameters() if weight.requires_grad and depths[id(weight)] <= n_blocks]


def _lower(view: ModelView, n_blocks: int) -> Iterator[nn.Module]:
    """Yield the outermost modules of the lower part."""
    depths, blocks = view.depths(), [block for _, block in view.blocks()]
    holders = {id(module) for module in view.model.modules() if _holds(module, blocks)}

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if any(child is block for block in blocks):
                yield from [child] if any(child is block for block in blocks[:n_blocks]) else []
            elif id(child) in holders:
                yield from below(child)
            elif all(depths[id(weight)] <= n_blocks for weight in child.parameters()):
                yield child

    yield from below(view.model.base_model)


def _holds(module: nn.Module, blocks: list[nn.Module]) -> bool:
    inside = {id(one) for one in module.modules()}
    return any(id(block) in inside and block is not module for block in blocks)
