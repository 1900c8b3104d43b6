"""All methods, in the order they are applied to a model: by stage, and by name within a stage.

A method's file is imported when settings ask for the method, or when a model has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any, cast

from torch import nn

from whet import plugins
from whet.config.method_names import BY_NAME, PACKAGE, MethodFile, method_files
from whet.config.methods import MethodSettings
from whet.methods.seam import Applied, Cost, Method
from whet.models import record
from whet.models.packed import packed_model, release
from whet.models.view import ModelView

_FUNCTIONS = {"apply": ["view", "settings"], "restore": ["view"], "cost": ["view", "settings"]}
_DEFAULTS = {one.name: one.default for one in fields(MethodSettings)}


@cache
def _method(name: str) -> Method:
    """Return the method of this name, imported now if nobody has asked for it so far."""
    module: Any = plugins.load(PACKAGE, method_files()[name].module)
    missing = [name for name in ("STAGE", *_FUNCTIONS) if not hasattr(module, name)]
    wrong = [
        f"{name}({', '.join(wanted)})"
        for name, wanted in _FUNCTIONS.items()
        if name not in missing and list(inspect.signature(getattr(module, name)).parameters) != wanted
    ]
    if missing or wrong:
        raise TypeError(f"{module.__file__} has a CARD, but is no method: it lacks {', '.join(missing + wrong)}")
    return cast(Method, module)


def methods(names: Iterable[str] | None = None) -> list[Method]:
    """Return the methods of these names, or every one, in their order; docs/methods.md prints it."""
    found = map(_method, method_files() if names is None else names)
    return sorted(found, key=lambda method: (method.STAGE, method.CARD.name))


def _wanted(view: ModelView, settings: MethodSettings) -> list[Method]:
    """Return the methods that the settings ask for, for a model like this."""
    return methods(name for name, file in method_files().items() if _asks(settings, name, file) and _suits(view, file))


def _asks(settings: MethodSettings, name: str, file: MethodFile) -> bool:
    if file.asked_by == BY_NAME:
        return name in settings.names
    field, _, value = file.wanted_by.partition("=")
    asked = getattr(settings, field)
    return asked == value if value else asked != _DEFAULTS[field]


def _suits(view: ModelView, file: MethodFile) -> bool:
    # wrappers of peft pass names on to what they hold, but their classes do not have them
    return not file.needs or any(hasattr(type(module), file.needs) for module in view.root.modules())


def apply(view: ModelView, settings: MethodSettings) -> list[Applied]:
    """Change the model as the settings ask; return what was done."""
    done = (method.apply(view, settings) for method in _wanted(view, settings))
    return [applied for applied in done if applied is not None]


def restore(model: nn.Module) -> nn.Module:
    """Undo every method exactly, in the reverse order; a model that whet did not change stays as it is."""
    view = ModelView(model)
    for method in reversed(methods(method_files().keys() & record.names(view.model))):
        method.restore(view)
    packed = packed_model(view.model)
    if packed is not None:
        release(packed)
    return model


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return what all methods together would add to the cost of training with these settings."""
    return sum((method.cost(view, settings) for method in _wanted(view, settings)), Cost())
