"""Imports of optional packages, and a block that silences libraries while they are imported."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from whet.errors import ConfigError
from whet.version import DISTRIBUTION


def extra(name: str) -> str:
    """Return the words after pip install that bring what one of whet's extras lists."""
    return f"'{DISTRIBUTION}[{name}]'"


def require(module: str, *, needed_for: str, install: str, environment: str = "") -> ModuleType:
    """Return the imported module, or raise a ConfigError that names what to install.

    `install` are the words after pip install, `environment` the variables before it.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a damaged package raises what it likes
        package = module.partition(".")[0]
        if not is_installed(package):
            what, fix = f"the package {module!r} is missing", f"run: {environment}pip install {install}"
        else:
            what = f"the package {module!r} is installed, and cannot be imported"
            again = package if install.startswith(f"'{DISTRIBUTION}[") else install
            fix = "install what it misses; or, if it is damaged, run: "
            fix += f"{environment}pip install --force-reinstall --no-deps {again}"
        raise ConfigError(
            what=what, got=str(error) or type(error).__name__, why=f"{needed_for} needs it", fix=fix
        ) from error


def is_installed(package: str) -> bool:
    """Return whether the package could be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


def is_from(value: object, module: str, name: str) -> bool:
    """Return whether the value is an instance of this class of a package, without importing the package for it."""
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return kind is not None and isinstance(value, kind)


_LOG_AT_IMPORT = ("torchao", "bitsandbytes", "torch.utils._pytree", "matplotlib")
"""Loggers that warn, at import, about parts of their packages that whet does not use, or a cache that is not kept.
transformers imports the first two packages if they are installed, so every program would begin with these warnings."""
_IMPORTED = ("torchao", "bitsandbytes")
_LOG_WHILE_IMPORTED = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Their loggers with these warnings by full name: a filter does not see the records of loggers below its own."""


def quiet_imports() -> None:
    """Drop what these loggers warn about while torchao or bitsandbytes is imported; all else they say is kept.

    This is for programs that import whet, and then transformers themselves. No level is changed.
    """
    for name in _LOG_WHILE_IMPORTED:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING or not any(
        name.partition(".")[0] in _IMPORTED and getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in [*sys.modules.items()]
    )


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Run the block without these libraries' warnings; a log level that the user has set for one of them stays."""
    unset = [logger for name in _LOG_AT_IMPORT if (logger := logging.getLogger(name)).level == logging.NOTSET]
    for logger in unset:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in unset:
            logger.setLevel(logging.NOTSET)
