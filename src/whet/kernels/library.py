"""The native operators' shared library: its file, its instruction set, and calls of its functions."""

import ctypes
import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch  # the library must come after torch: torch's own libgomp then serves both, with one pool of threads

from whet.config import environment
from whet.errors import ConfigError
from whet.kernels import structs
from whet.version import DISTRIBUTION

_LOG = logging.getLogger(__name__)
FILE_NAME = "_native.so"
CHOICE = "WHET_KERNELS"
"""Environment variable: native or reference (plain torch); unset: native if the library is there."""
TIMES_AS_LONG = 2.6
"""A step of MiniLM's size in plain torch, over one with the operators: `benchmarks/cpu/plain_torch.py`."""
_COST = f"plain torch runs instead, and a step takes about {TIMES_AS_LONG} times as long"


class Library:
    """The loaded library. `isa` names the instruction set in use; WHET_ISA=v3 or baseline selects a smaller one."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.path = path
        self._functions = {name: _function(loaded, name, kind) for name, kind in structs.OPERATORS.items()}
        loaded.whet_isa.restype = ctypes.c_char_p
        self.isa: str = loaded.whet_isa().decode()

    def call(self, name: str, args: ctypes.Structure) -> None:
        """Run one operator; its pointers must stay valid until it returns."""
        self._functions[name](ctypes.byref(args))


@cache
def library() -> Library | None:
    """Return the library; None if there is none or WHET_KERNELS=reference (one log line says why).

    The variable is read at the first call. Raises ConfigError if it asks for native operators that cannot be loaded.
    """
    assert torch.__version__  # loaded before, see above
    asked = choice()
    if asked == "reference":
        _LOG.info("operators in plain torch, because %s=reference: a step takes longer", CHOICE)
        return None
    path, error = find(), None
    try:
        if path is not None:
            return Library(path)
    except (OSError, AttributeError, ValueError) as caught:
        error = caught
    if asked == "native":
        raise _not_there(error) from error
    if path is None:
        _LOG.warning("no native operators here: %s (build them: python -m whet.kernels.build)", _COST)
    else:
        _LOG.warning("the native operators in %s cannot be used: %s (%s); %s", path, _COST, error, _how_to_replace())
    return None


def choice() -> str | None:
    """Return the value of WHET_KERNELS, None if it is not set; ConfigError for an unknown value."""
    return environment.value(CHOICE)


def _not_there(error: Exception | None) -> ConfigError:
    return ConfigError(
        what=f"{CHOICE}=native asks for the native operators, and they cannot be loaded",
        got="no library" if error is None else str(error),
        why="without the variable, plain torch would run instead",
        fix=f"{_how_to_replace()}; or unset {CHOICE}",
    )


def _how_to_replace() -> str:
    """Return the command that provides a matching library: a build in a checkout, else an installation."""
    if (Path(__file__).parents[3] / "CMakeLists.txt").exists():
        return "build them again: python -m whet.kernels.build"
    return f"install them again: pip install --force-reinstall --no-deps {DISTRIBUTION}"


def find() -> Path | None:
    """Return the library's file, usable or not; None if there is none."""
    return next((path for path in _candidates() if path.exists()), None)


def _candidates() -> Iterator[Path]:
    """Yield possible files: built in place, or installed (an editable install puts it into site-packages)."""
    yield Path(__file__).with_name(FILE_NAME)
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(installed.locate_file(f"whet/kernels/{FILE_NAME}")))


def _function(loaded: ctypes.CDLL, name: str, kind: type[ctypes.Structure]) -> Any:
    """Return the operator, after checking that the library expects the same size of arguments."""
    size = getattr(loaded, f"whet_sizeof_{name}")
    size.restype = ctypes.c_size_t
    if size() != ctypes.sizeof(kind):
        raise ValueError(f"built for another version of whet: {name} takes {size()} bytes, not {ctypes.sizeof(kind)}")
    function = getattr(loaded, f"whet_{name}")
    function.argtypes, function.restype = [ctypes.POINTER(kind)], None
    return function
