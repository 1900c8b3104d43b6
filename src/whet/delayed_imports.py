"""Delays what transformers imports ahead of need, so that a command does not wait for packages that it never uses.

Wherever they are installed, transformers imports peft (which imports bitsandbytes and torch's compiler), torchao,
accelerate and others, for a few names each. In the block of `delayed` it gets objects in place of these names, which
import the package when they are called, read or inherited from. Modules of others never see them: what they import is
the package itself.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Union

PACKAGES = frozenset({"accelerate", "bitsandbytes", "datasets", "peft", "scipy", "sklearn", "torchao"})
"""Packages that transformers imports if they are installed, for a part of their users."""


class _Name:
    """A name of a package that is not imported yet: everything but `isinstance` imports it."""

    def __init__(self, module: str, name: str) -> None:
        self.__module, self.__name = module, name

    def __real(self) -> Any:
        return getattr(_really(self.__module), self.__name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.__real()(*values, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not _is_loaded(self.__module):  # typing asks annotations for such names
            raise AttributeError(name)
        return getattr(self.__real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.__real(),)

    def __instancecheck__(self, value: object) -> bool:
        """Nothing is an instance of a class whose package nobody has imported."""
        return _is_loaded(self.__module) and isinstance(value, self.__real())

    def __subclasscheck__(self, kind: type) -> bool:
        return _is_loaded(self.__module) and issubclass(kind, self.__real())

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 (of an annotation, which stands for itself)

    __ror__ = __or__


class _Stand(ModuleType):
    """Stands for a module while transformers imports names from it."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _words(str(self.__file__)):
            return _Name(self.__name__, name)
        return getattr(_really(self.__name__), name)  # a name that the package computes


@cache
def _words(path: str) -> frozenset[str]:
    """Return every word of a source file."""
    return frozenset(re.findall(r"\w+", Path(path).read_text("utf-8", "replace")))


class _StandLoader(Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _thread.standing.append(spec.name)
        return _Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._path


class _OfTransformers(SourceFileLoader):
    """Loads a module of transformers, with objects in place of what it imports ahead of need."""

    def exec_module(self, module: ModuleType) -> None:
        with standing():
            super().exec_module(module)


class _OfOthers(SourceFileLoader):
    """Loads a module that transformers imports, and that is to have the real packages."""

    def exec_module(self, module: ModuleType) -> None:
        _sit()
        with standing(depth=0):
            super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if root != "transformers" and _thread.depth == 0:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        if root in PACKAGES and not _is_loaded(root):
            spec.loader = _StandLoader(spec.loader.path)
        else:
            loader = _OfTransformers if root == "transformers" else _OfOthers
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


class _Thread(threading.local):
    depth = 0
    """How many modules of transformers this thread is importing, each from the one before."""

    def __init__(self) -> None:
        self.standing: list[str] = []
        """The modules that stand-ins stand for at the moment."""


_thread = _Thread()
_finder = _Finder()


@contextmanager
def delayed() -> Iterator[None]:
    """Let transformers' imports in this block wait until something uses them."""
    if _finder in sys.meta_path:
        yield
        return
    sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_finder)


@contextmanager
def standing(depth: int | None = None) -> Iterator[None]:
    """Give the imports of this block stand-ins too, if they are delayed: for a call of transformers that imports."""
    before = _thread.depth
    _thread.depth = before + 1 if depth is None else depth
    try:
        yield
    finally:
        _thread.depth = before
        if before == 0:
            _sit()


def _sit() -> None:
    """Take the stand-ins out of the modules, so that the next import is the usual one."""
    while _thread.standing:
        name = _thread.standing.pop()
        if isinstance(sys.modules.get(name), _Stand):
            del sys.modules[name]


def _really(name: str) -> ModuleType:
    """Return the module itself, imported now if nobody has done that."""
    _sit()
    with standing(depth=0):
        return import_module(name)


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not isinstance(module, _Stand)
