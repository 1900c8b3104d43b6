"""Models with experts, loaded by transformers: a class that is built with them before its weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whet.models.experts.settings import KEY, parsed, settings_of
from whet.models.loading.folder_check import bad_model

_DENSE = "whet_dense_class"


def class_with_experts(cls: type, config: Any) -> type:
    """Return the class of transformers, whose models are built with the experts of this configuration."""
    from whet.models.experts.upcycle import replace_parts

    settings = parsed(getattr(config, KEY))
    assert settings is not None

    def begin(self: Any, config: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, config, *args, **options)
        replace_parts(self, settings, copied=False)

    return type(cls.__name__, (cls,), {"__init__": begin, "__module__": cls.__module__, _DENSE: cls})


def finish(model: Any, missing: Iterable[str], folder: str) -> None:
    """Give a model that has been loaded with its experts its own class again, and refuse one without their weights."""
    if settings_of(model.config) is None:
        return
    from whet.models.experts.layer import layers_of

    model.__class__ = getattr(type(model), _DENSE)
    layers = tuple(f"{name}." for name, _ in layers_of(model))
    lost = sorted(name for name in missing if name.startswith(layers))
    if lost:
        raise bad_model(
            f"{folder} lacks weights of its experts",
            got=", ".join(lost[:3]),
            why="config.json says that the model has experts, and new ones would know nothing",
            fix="copy the folder again from where it comes",
        )
