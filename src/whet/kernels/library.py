"""The native operators' shared library: where it lies, what it uses of the processor, and how it is called."""

import ctypes
import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch  # the library must come after torch: torch's own libgomp then serves both, with one pool of threads

from whet.kernels import structs

_LOG = logging.getLogger(__name__)
FILE_NAME = "_native.so"
TIMES_AS_LONG = 2.6
"""A step of MiniLM's size in plain torch, over one with the operators: `benchmarks/cpu/plain_torch.py`."""
_COST = f"plain torch runs instead, and a step takes about {TIMES_AS_LONG} times as long"


class Library:
    """The loaded library. `isa` names the instruction set in use; WHET_ISA=v3 or baseline asks for a lesser one."""

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
    """Return the library, or None where there is none for this machine (one log line says why)."""
    assert torch.__version__  # loaded before, see above
    path = find()
    if path is None:
        _LOG.warning("no native operators here: %s (build them: python -m whet.kernels.build)", _COST)
        return None
    try:
        return Library(path)
    except (OSError, AttributeError, ValueError) as error:
        _LOG.warning("the native operators in %s cannot be used: %s (%s); %s", path, _COST, error, _how_to_replace())
        return None


def _how_to_replace() -> str:
    """Return what brings a library that fits: a build in a checkout, another installation elsewhere."""
    if (Path(__file__).parents[3] / "CMakeLists.txt").exists():
        return "build them again: python -m whet.kernels.build"
    return "install them again: pip install --force-reinstall --no-deps whet"


def find() -> Path | None:
    """Return the library's file, whether or not it can be used; None where there is none."""
    return next((path for path in _places() if path.exists()), None)


def _places() -> Iterator[Path]:
    """Yield where the file may lie: built in place, or installed (an editable install keeps it in site-packages)."""
    yield Path(__file__).with_name(FILE_NAME)
    try:
        installed = importlib.metadata.distribution("whet")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(installed.locate_file(f"whet/kernels/{FILE_NAME}")))


def _function(loaded: ctypes.CDLL, name: str, kind: type[ctypes.Structure]) -> Any:
    """Return the operator, after a check that both sides agree on the size of its arguments."""
    size = getattr(loaded, f"whet_sizeof_{name}")
    size.restype = ctypes.c_size_t
    if size() != ctypes.sizeof(kind):
        raise ValueError(f"built for another version of whet: {name} takes {size()} bytes, not {ctypes.sizeof(kind)}")
    function = getattr(loaded, f"whet_{name}")
    function.argtypes, function.restype = [ctypes.POINTER(kind)], None
    return function
