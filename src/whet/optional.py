"""The only place that imports optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType

from whet.errors import ConfigError


def require(module: str, *, needed_for: str, install: str) -> ModuleType:
    """Return the imported module, or raise a ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            what=f"the package {module!r} is missing",
            got=str(error),
            why=f"{needed_for} needs it",
            fix=f"run: pip install {install}",
        ) from error
