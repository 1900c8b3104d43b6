"""All methods, in the order they are applied to a model: by stage, and by name within a stage."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, cast

from torch import nn

from whet.config.method_names import method_files
from whet.config.methods import MethodSettings
from whet.methods.seam import Applied, Cost, Method
from whet.models.packed import packed_model, release
from whet.models.view import ModelView

_FUNCTIONS = {"apply": ["view", "settings"], "restore": ["view"], "cost": ["view", "settings"]}


def _method(module_name: str) -> Method:
    """Return the method in this module of the folder."""
    module: Any = import_module(f"whet.methods.{module_name}")
    missing = [name for name in ("STAGE", *_FUNCTIONS) if not hasattr(module, name)]
    wrong = [
        f"{name}({', '.join(wanted)})"
        for name, wanted in _FUNCTIONS.items()
        if name not in missing and list(inspect.signature(getattr(module, name)).parameters) != wanted
    ]
    if missing or wrong:
        raise TypeError(f"{module.__file__} has a CARD, but is no method: it lacks {', '.join(missing + wrong)}")
    return cast(Method, module)


METHODS: tuple[Method, ...] = tuple(
    sorted(map(_method, method_files().values()), key=lambda method: (method.STAGE, method.CARD.name))
)
"""Every method of this folder; docs/methods.md prints the order."""


def apply(view: ModelView, settings: MethodSettings) -> list[Applied]:
    """Change the model as the settings ask; return what was done."""
    done = (method.apply(view, settings) for method in METHODS)
    return [applied for applied in done if applied is not None]


def restore(model: nn.Module) -> nn.Module:
    """Undo every method exactly, in the reverse order; a model that whet did not change stays as it is."""
    view = ModelView(model)
    for method in reversed(METHODS):
        method.restore(view)
    packed = packed_model(view.model)
    if packed is not None:
        release(packed)
    return model


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return what all methods together would add to the cost of training with these settings."""
    return sum((method.cost(view, settings) for method in METHODS), Cost())
