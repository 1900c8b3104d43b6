"""The families that whet knows: every module in `families/`, found by listing the folder."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

import torch
from torch import nn

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


def of_type(model: nn.Module) -> Family | None:
    """Return the family of the model's `model_type`, or the one that a proof has found for this model.

    An encoder whose configuration makes it a decoder counts as unknown: its attention is causal.
    """
    config = getattr(model, "config", None)
    found = known().get(getattr(config, "model_type", ""))
    if getattr(config, "is_decoder", False) and (found is None or not found.causal):
        return None
    verdict = recorded(model) if found is None else None
    return found if verdict is None else verdict.family


@torch.compiler.assume_constant_result  # the listing of a folder cannot be part of a graph
def owner_of(cls: type) -> Family | None:
    """Return the family in whose package the class is defined."""
    return next((family for family in known().values() if family.owns(cls)), None)
