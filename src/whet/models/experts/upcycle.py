"""Dense feed-forward parts that become sparse: each expert begins as a copy (Komatsuzaki et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from whet import console
from whet.errors import ConfigError
from whet.log import logger
from whet.models import known
from whet.models.adapters import is_pefts, unwrapped
from whet.models.experts import settings as kept
from whet.models.experts.layer import ExpertShape, SparseFeedForward, layers_of
from whet.models.experts.settings import ExpertSettings
from whet.models.family import FeedForward
from whet.models.forwards import bind
from whet.models.view import ModelView

_ROUTER_STD = 0.02
"""Standard deviation of a new router's weights (Komatsuzaki et al. 2023, section 3)."""


def upcycle(model: Any, settings: ExpertSettings, *, seed: int = 42) -> Any:
    """Make every n-th feed-forward part of the model sparse, in place; return the model.

    Every expert is a copy of the dense part, and the factors of a token's experts sum to 1: the model computes what it
    did. Routers are drawn from the seed. A model that is sparse already keeps its experts, if the settings agree, and
    takes the factors of the settings. Raises ConfigError for a model whose feed-forward parts are not known.
    """
    base = unwrapped(model)
    before = kept.settings_of(base.config)
    if before is not None:
        return _again(model, before, settings)
    replace_parts(base, settings, copied=True)
    generator = torch.Generator().manual_seed(seed)
    layers = [layer for _, layer in layers_of(base)]
    with torch.no_grad():
        for layer in layers:
            weight = layer.router.weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * _ROUTER_STD)
    kept.keep(base.config, settings)
    n_weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
    logger.info(
        "experts: %d of %d feed-forward parts have %d experts each, %d of them compute a token; %s weights",
        len(layers), len(ModelView(base).blocks()), settings.experts, settings.top_k, console.count(n_weights),
    )  # fmt: skip
    return model


def replace_parts(model: Any, settings: ExpertSettings, *, copied: bool) -> None:
    """Put sparse layers in the place of every n-th feed-forward part; without `copied` their weights have no values."""
    family, blocks = known.of_model(model), [block for _, block in ModelView(model).blocks()]
    parts = None if family is None else family.feed_forward
    if parts is None:
        raise _not_known(model)
    sparse = blocks[settings.every - 1 :: settings.every]
    if not sparse:
        raise ConfigError(
            what="no feed-forward part becomes sparse",
            got=f"moe_every {settings.every} of {len(blocks)} blocks",
            why="every n-th block gets experts, counted from the first",
            fix=f"use --moe_every {len(blocks)} or less",
        )
    for block in sparse:
        _replace(block, parts, settings, copied=copied)
    model.save_pretrained = bind(_save_as_sparse, model)


def _save_as_sparse(model: Any, save_directory: Any, is_main_process: bool = True, *given: Any, **options: Any) -> None:
    """Save the model as its class does, and name it as one with experts (`mark_saved`)."""
    if options.get("push_to_hub"):
        raise ConfigError(
            what="save_pretrained does not upload a model with experts",
            got="push_to_hub=True",
            why="it would upload config.json before that names the experts, and others would load a dense model",
            fix="save it first, then call model.push_to_hub(NAME)",
        )
    type(model).save_pretrained(model, save_directory, is_main_process, *given, **options)
    if is_main_process:  # the one that writes config.json
        kept.mark_saved(Path(save_directory), model.config)


def _again(model: Any, before: ExpertSettings, settings: ExpertSettings) -> Any:
    """Return a model that has its experts already, with the new factors."""
    if before.structure != settings.structure:
        raise ConfigError(
            what="the model has other experts than these",
            got=f"{settings.experts} experts in every {settings.every} blocks asked for, {before.experts} in every "
            f"{before.every} there",
            why="its weights are those of its own experts",
            fix=f"use --moe_experts {before.experts} --moe_every {before.every}, or name the dense model in "
            "--model_name_or_path",
        )
    for _, layer in layers_of(model):
        layer.top_k, layer.capacity_factor = settings.top_k, settings.capacity_factor
    kept.keep(unwrapped(model).config, settings)
    return model


def _replace(block: nn.Module, parts: FeedForward, settings: ExpertSettings, *, copied: bool) -> None:
    """Replace the feed-forward part of one block."""
    _require_no_inner_dropout(block, parts)
    _require_no_adapters(block, parts)
    ups, down = [block.get_submodule(path) for path in parts.up], block.get_submodule(parts.down)
    up_weights, down_weight = [_weight(one) for one in ups], _weight(down)
    gated = parts.joined or len(ups) == 2
    biases = [getattr(one, "bias", None) for one in (*ups, down)]
    shape = ExpertShape(
        width=down_weight.shape[0], inner=down_weight.shape[1], gated=gated,
        bias=any(one is not None for one in biases), dtype=down_weight.dtype,
    )  # fmt: skip
    dropout = None if parts.dropout is None else block.get_submodule(parts.dropout)
    with torch.device(down_weight.device):
        layer = SparseFeedForward(shape, settings, block.get_submodule(parts.activation), dropout)
    if copied:
        _copy(layer, torch.cat(up_weights), down_weight, biases)
    _put(block, parts.path, layer)
    if not parts.down.startswith(f"{parts.path}."):
        _put(block, parts.down, nn.Identity())


@torch.no_grad()
def _copy(layer: SparseFeedForward, up: Tensor, down: Tensor, biases: Sequence[Tensor | None]) -> None:
    """Give every expert the weights of the dense part; a bias that it lacks is 0."""
    layer.up_proj.copy_(up)
    layer.down_proj.copy_(down)
    if layer.up_bias is not None and layer.down_bias is not None:
        of_up = [one for one in biases[:-1] if one is not None]
        layer.up_bias.copy_(torch.cat(of_up) if of_up else torch.zeros(()))
        layer.down_bias.copy_(torch.zeros(()) if biases[-1] is None else biases[-1])


def _weight(linear: Any) -> Tensor:
    """Return the weight (out, in) of a linear layer; Conv1D has it the other way round."""
    return linear.weight.t() if isinstance(linear, Conv1D) else linear.weight


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    setattr(block.get_submodule(holder), name, module)


def _require_no_inner_dropout(block: nn.Module, parts: FeedForward) -> None:
    inner = None if parts.inner_dropout is None else block.get_submodule(parts.inner_dropout)
    if getattr(inner, "p", 0.0):
        raise ConfigError(
            what="the model's feed-forward parts have a dropout between their layers",
            got=f"{parts.inner_dropout} {getattr(inner, 'p', None)}",
            why="tokens lie in another order there, and dropout masks follow the order of the batch",
            fix="set it to 0 in config.json (mlp_dropout of ModernBERT)",
        )


def _require_no_adapters(block: nn.Module, parts: FeedForward) -> None:
    """Refuse adapters of peft around or inside the part: experts that copy its weight would leave them out."""
    paths = (*parts.up, parts.down)
    names = [path.split(".") for path in paths]
    around = [block.get_submodule(".".join(name[: n + 1])) for name in names for n in range(len(name))]
    held = [type(one).__name__ for one in around if is_pefts(one)]
    if held:
        raise ConfigError(
            what="the feed-forward parts of this model hold adapters",
            got=f"{held[0]} of peft",
            why="each expert begins as a copy of the weights alone, and what the adapters learnt would be lost",
            fix="give the model its experts before the adapters; or merge these: model = model.merge_and_unload()",
        )


def _not_known(model: Any) -> ConfigError:
    can = [name for name, family in known.known().items() if family.feed_forward is not None]
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return ConfigError(
        what="whet does not know the feed-forward parts of this model",
        got=kind,
        why="experts take the place of a feed-forward part that each block has for itself",
        fix=f"use a model of type {', '.join(can)}; or leave --moe_experts out",
    )
