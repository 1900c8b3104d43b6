"""The families that whet knows: every module in `families/`, found by listing the folder."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.models import families
from whet.models.family import Family
from whet.models.proof.verdict import recorded


@cache
def known() -> Mapping[str, Family]:
    """Return the family of each `model_type`, sorted by it; the first call imports the families' modules."""
    found: dict[str, Family] = {}
    for name in sorted(one.name for one in iter_modules(families.__path__)):
        family: Family = import_module(f"{families.__name__}.{name}").FAMILY
        for model_type in family.model_types:
            assert model_type not in found, f"two families have the model_type {model_type}"
            found[model_type] = family
    return MappingProxyType(dict(sorted(found.items())))


def names(*, causal: bool | None = False) -> str:
    """Return the known model types of encoders, of causal decoders, or of both (None), as text for a message."""
    return ", ".join(name for name, family in known().items() if causal in (None, family.causal))


def of_model(model: nn.Module) -> Family | None:
    """Return the family of the model's encoder by its class, or the one that a proof has found for this model."""
    found = of_classes(model)
    verdict = recorded(model) if found is None else None
    return found if verdict is None else verdict.family


def of_classes(model: nn.Module) -> Family | None:
    """Return the family that has defined the forward of the model's encoder; None: it is somebody else's.

    The configuration says nothing: modules of a user's own borrow one, or hold encoders of that family.
    """
    encoder = encoder_of(model)
    if encoder is None:
        return None
    home = home_of_forward(type(encoder))
    family = known().get(getattr(getattr(home, "config_class", None), "model_type", ""))
    if family is None or not family.owns(home):
        return None
    return _of_blocks(encoder) or family  # a family may have the forward of another around blocks of its own


def _of_blocks(encoder: nn.Module) -> Family | None:
    """Return the family that defines the blocks of the encoder, as its first one says."""
    owners = ((module, owner_of(type(module))) for module in encoder.modules())
    return next((owner for module, owner in owners if owner is not None and owner.is_block(module)), None)


def encoder_of(model: Any) -> PreTrainedModel | None:
    """Return the encoder of a model of transformers, which may be the model; None for any other module.

    A model of a user's own that keeps its encoder under another name than its class's `base_model_prefix` is itself
    what transformers calls its `base_model`.
    """
    base = model.base_model if isinstance(model, PreTrainedModel) else None
    return base if isinstance(base, PreTrainedModel) and base.base_model is base else None


def encoders_inside(model: nn.Module) -> list[PreTrainedModel]:
    """Return the other encoders of known families that a module holds, next to its own or in place of one."""
    own = encoder_of(model)
    others = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part not in (own, model))
    return [part for part in others if encoder_of(part) is part and of_classes(part) is not None]


def home_of_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class, this one or one that it inherits from, that defines its forward."""
    return next(one for one in cls.__mro__ if "forward" in vars(one))


@torch.compiler.assume_constant_result  # the listing of a folder cannot be part of a graph
def owner_of(cls: type) -> Family | None:
    """Return the family in whose package the class is defined."""
    return next((family for family in known().values() if family.owns(cls)), None)
