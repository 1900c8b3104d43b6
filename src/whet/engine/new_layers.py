"""New weights for the last blocks of a pretrained model (`reinit_layers`), before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models.experts.layer import layers_of
from whet.models.view import ModelView

_SAYS_DONE = "_is_hf_initialized"
"""By this attribute of a tensor, transformers leaves its values as they are."""


def draw(model: nn.Module, n_blocks: int, seed: int) -> str:
    """Give the last blocks and the pooler new weights; return what was done, for the log.

    The weights are those that the `_init_weights` of the model's class draws after `torch.manual_seed(seed)`, block by
    block and then the pooler (Zhang et al. 2021, arXiv:2006.05987, section 5). Other random numbers of the process do
    not change. Raises ConfigError for a model whose last blocks are not known, or not trained.
    """
    modules = _chosen(model, n_blocks)
    weights = [weight for module in modules for weight in module.parameters()]
    if any(not weight.requires_grad for weight in weights):
        raise ConfigError(
            what="reinit_layers would draw new weights that are never trained",
            got=f"{sum(not weight.requires_grad for weight in weights)} frozen weights in the last {n_blocks} blocks",
            why="new weights have to be learnt, and a frozen one keeps its random value",
            fix="leave --reinit_layers out, or train these blocks",
        )
    if any(layers_of(module) for module in modules):
        why = "experts begin as copies of pretrained weights, and new ones would know nothing"
        raise _refusal(model, n_blocks, why, "leave --reinit_layers out")
    owner = _owner(model, modules[0])
    with torch.random.fork_rng({weight.device.index for weight in weights if weight.is_cuda}), _not_done(weights):
        torch.manual_seed(seed)
        with torch.no_grad():
            for module in modules:
                module.apply(owner._init_weights)
    blocks = f"the last {n_blocks} of {len(ModelView(model).blocks())} blocks"
    pooler = " and the pooler" if len(modules) > n_blocks else ""
    return f"new weights in {blocks}{pooler}, drawn with seed {seed}"


def drawn_by_recipe(model: nn.Module, n_blocks: int, seed: int) -> str:
    """As `draw`, for a recipe: a model that it does not go with keeps its weights, and the log says why."""
    try:
        if type(ModelView(model).model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            raise _refusal(model, n_blocks, "it was measured for encoders alone", "leave --reinit_layers out")
        return draw(model, n_blocks, seed)
    except ConfigError as error:
        return f"the recipe's reinit_layers {n_blocks} is left out: {error.problems[0].why}"


def _chosen(model: nn.Module, n_blocks: int) -> list[nn.Module]:
    """Return the last blocks, and the pooler if the encoder has one with weights."""
    view = ModelView(model)
    blocks = view.blocks()
    if not view.depths():
        why = "it needs one stack of blocks with weights of their own: whet cannot tell which are the last ones"
        raise _refusal(model, n_blocks, why, "leave --reinit_layers out")
    if n_blocks >= len(blocks):
        fewer = f"use --reinit_layers {len(blocks) - 1} or less, or leave it out"
        raise _refusal(model, n_blocks, f"none of its {len(blocks)} pretrained blocks would be left", fewer)
    chosen = [block for _, block in blocks[len(blocks) - n_blocks :]]
    pooler = getattr(view.model.base_model, "pooler", None)
    if isinstance(pooler, nn.Module) and any(True for _ in pooler.parameters()):
        chosen.append(pooler)
    return chosen


def _refusal(model: nn.Module, n_blocks: int, why: str, fix: str) -> ConfigError:
    got = f"{n_blocks} for {type(ModelView(model).model).__name__}"
    return ConfigError(what="reinit_layers does not go with this model", got=got, why=why, fix=fix)


def _owner(model: nn.Module, block: nn.Module) -> PreTrainedModel:
    """Return the innermost model of transformers that the block is a part of: it knows how its blocks begin."""
    owners = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    return [one for one in owners if any(module is block for module in one.modules())][-1]


@contextmanager
def _not_done(weights: Sequence[Tensor]) -> Iterator[None]:
    """Let transformers draw these weights again within the block."""
    marked = [weight for weight in weights if getattr(weight, _SAYS_DONE, False)]
    for weight in marked:
        delattr(weight, _SAYS_DONE)
    try:
        yield
    finally:
        for weight in marked:
            setattr(weight, _SAYS_DONE, True)
