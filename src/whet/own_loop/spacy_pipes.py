"""The PyTorch modules inside spaCy: of a pipeline, of one of its components, or of a thinc Model.

thinc keeps a PyTorch module in a shim, which is no attribute that a module could be found by. spaCy is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_HOMES = ("spacy.", "thinc.")


def is_of_spacy(holder: Any) -> bool:
    """Return whether this is an object of spaCy or thinc, or of a class that is derived from theirs."""
    return not isinstance(holder, type) and any(f"{cls.__module__}.".startswith(_HOMES) for cls in type(holder).__mro__)


def modules_in(holder: Any) -> list[tuple[str, nn.Module]]:
    """Return the PyTorch modules of every component, also of disabled ones, each once and with a name."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, model in _thinc_models(holder):
        modules = [module for module in _in_shims(model) if id(module) not in found]
        for number, module in enumerate(modules):
            found[id(module)] = (f"{name}.{number}" if len(modules) > 1 else name, module)
    return list(found.values())


def _thinc_models(holder: Any) -> Iterator[tuple[str, Any]]:
    components = getattr(holder, "components", None)  # of a Language: (name, component)
    for name, one in components if components is not None else [(getattr(holder, "name", ""), holder)]:
        model = one if hasattr(one, "walk") else getattr(one, "model", None)
        if hasattr(model, "walk"):
            yield str(name), model


def _in_shims(model: Any) -> Iterator[nn.Module]:
    for node in model.walk():
        for shim in node.shims:
            module = getattr(shim, "_model", None)
            if isinstance(module, nn.Module):
                yield module
