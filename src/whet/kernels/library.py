"""The native operators' shared library: its file, its instruction set, and calls of its functions.

An operator is declared in C++ alone (native/operator.h). The library holds the text of its declaration, from which
Python's side of the call is made here.
"""

import ctypes
import hashlib
import logging
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch  # the library must come after torch: torch's own libgomp then serves both, with one pool of threads
from torch import Tensor

from whet.config import environment
from whet.errors import ConfigError
from whet.kernels.native_file import find
from whet.system import is_linux
from whet.version import DISTRIBUTION

_LOG = logging.getLogger(__name__)
CHOICE = "WHET_KERNELS"
"""Environment variable: native or reference (plain torch); unset: native if the library is there."""
TIMES_AS_LONG = 2.6
"""A step of MiniLM's size in plain torch, over one with the operators: `benchmarks/cpu/plain_torch.py`."""
_COST = f"plain torch runs instead, and a step takes about {TIMES_AS_LONG} times as long"


_NUMBERS = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f", "double": "d"}
"""The types of C in the formats of Python's `struct`."""
_VIEW = struct.Struct("@Pqq")
"""`View` of native/operator.h, which is packed most often."""
Pack = Callable[[dict[str, Any]], bytes]
_address = Tensor.data_ptr


class _Fields(ctypes.Structure):
    """`Fields` of native/operator.h."""

    _fields_ = (("text", ctypes.c_char_p), ("size", ctypes.c_size_t))


class Library:
    """The loaded library. `isa` names the instruction set in use; WHET_ISA=v3 or baseline selects a smaller one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))
        self.isa = self._text("whet_isa")
        self.sources = self._text("whet_sources")
        """The digest of the sources that it was built from."""
        self._prefix = f"whet_{self._text('whet_operators')}_"
        self._packs: dict[str, Pack] = {}
        self.operators: dict[str, tuple[Pack, Any]] = {}
        """Those that `load_operator` has found, by name."""

    def pack(self, structure: str) -> Pack:
        """Return the function that writes this structure as in C, from arguments by the names of its members."""
        if structure not in self._packs:
            declared = _Fields.in_dll(self._loaded, f"whet_fields_{structure}")
            self._packs[structure] = self._pack_of(declared.text.decode(), declared.size)
        return self._packs[structure]

    def load_operator(self, name: str) -> tuple[Pack, Any]:
        """Return what packs the arguments of this operator, and the operator, which takes what that returns."""
        structure = ctypes.c_char.in_dll(self._loaded, f"whet_arguments_of_{name}")
        function = getattr(self._loaded, self._prefix + name)
        function.argtypes, function.restype = [ctypes.c_char_p], None
        found = self.pack(ctypes.string_at(ctypes.addressof(structure)).decode()), function
        self.operators[name] = found
        return found

    def fill_gaps(self) -> bool:
        """Let torch's blocks take the places of freed ones (native/heap.cpp); False where that is not possible."""
        return self._loaded.whet_fill_gaps() > 0

    def _pack_of(self, declarations: str, size: int) -> Pack:
        """Return `pack` for these declarations in C."""
        layout = "@"
        zeros: list[Any] = []
        places: dict[str, tuple[int, Callable[[Any], Any] | None]] = {}
        for kind, name, count in _members(declarations):
            if count:
                places |= {f"{name}[{i}]": (len(zeros) + i, _address) for i in range(count)}
                zeros += [0] * count
                layout += f"{count}P"
                continue
            places[name] = len(zeros), _address if kind == "*" else _view if kind == "View" else None
            if kind == "*" or kind in _NUMBERS:
                zeros.append(0)
                layout += _NUMBERS.get(kind, "P")
            else:
                zeros.append(self.pack(kind)({}))
                layout += f"0q{len(zeros[-1])}s0q"  # at a multiple of 8 bytes, since it has pointers
        form = struct.Struct(layout + "0q")
        assert form.size == size, declarations

        def pack(given: dict[str, Any]) -> bytes:
            values = zeros.copy()
            for name, value in given.items():
                if value is not None:
                    place, converted = places[name]
                    values[place] = value if converted is None or type(value) is int else converted(value)
            return form.pack(*values)

        return pack

    def _text(self, function: str) -> str:
        found = getattr(self._loaded, function)
        found.restype = ctypes.c_char_p
        return found().decode()


def _view(tensor: Tensor) -> bytes:
    token_stride, head_stride, _ = tensor.stride()
    return _VIEW.pack(tensor.data_ptr(), token_stride, head_stride)


def _members(declarations: str) -> Iterator[tuple[str, str, int]]:
    """Yield type, name and length of the members of a structure in C; "*" is any pointer, 0 is no array."""
    for declaration in declarations.split(";")[:-1]:
        kind, _, names = declaration.rpartition("*") if "*" in declaration else declaration.strip().partition(" ")
        for member in names.split(","):
            name, _, length = member.strip().rstrip("]").partition("[")
            yield "*" if "*" in declaration else kind, name, int(length or 0)


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
            return load(path)
    except (OSError, AttributeError, ValueError) as caught:
        error = caught
    if asked == "native":
        raise _not_there(error) from error
    if path is None:
        why = "build them: python -m whet.kernels.build" if is_linux() else "whet has them for Linux alone"
        _LOG.warning("no native operators here: %s (%s)", _COST, why)
    else:
        _LOG.warning("the native operators in %s cannot be used: %s (%s); %s", path, _COST, error, _how_to_replace())
    return None


def load(path: Path) -> Library:
    """Return the library in this file; OSError, AttributeError or ValueError if it is none of this version of whet."""
    found, sources = Library(path), Path(__file__).with_name("native")
    if sources.exists() and found.sources != _digest(sources):
        raise ValueError(f"built from other sources than those in {sources}")
    return found


def _digest(folder: Path) -> str:
    """Return the digest of the operators' sources, as CMakeLists.txt computes it."""
    sources = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*") if path.suffix in (".cpp", ".h")
    }
    each = (hashlib.sha256(sources[name].read_bytes()).hexdigest() for name in sorted(sources))
    return hashlib.sha256("".join(each).encode()).hexdigest()


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
