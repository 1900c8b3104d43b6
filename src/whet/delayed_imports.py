"""Delays what transformers imports ahead of need, so that a command does not wait for packages that it never uses.

Wherever they are installed, transformers imports peft, torchao, accelerate and others, and of torch the compiler and
what shards tensors over ranks, for a few names each. In the block of `delayed` it gets objects in place of these names,
which import the package when they are called, read or inherited from. Modules of others never see them: what they
import is the package itself. A few functions of torch and transformers that import such a package whenever they are
called are replaced (`_REPLACEMENTS`). Nobody looks for garbage while torch and transformers are imported.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Union

DELAYED = frozenset({
    *("accelerate", "bitsandbytes", "datasets", "peft", "scipy", "sklearn", "torchao", "torch._dynamo"),
    *(f"torch.distributed.{name}" for name in ("_composable", "checkpoint", "fsdp", "tensor")),
})  # fmt: skip
"""Packages and modules that transformers imports ahead of need, for a part of its users."""


SWITCH = "WHET_IMPORTS"
"""Environment variable: delayed, the default, or eager, which leaves torch and transformers as they are."""


class _Name:
    """A name of a package that is not imported yet: everything but `isinstance` imports it.

    Nor do calls of torch's while transformers is imported, which decorate a function or describe how a tensor is
    sharded: what they return is another such name.
    """

    def __init__(self, module: str, name: str, compute: Callable[[], Any] | None = None) -> None:
        self.__module, self.__name = module, name
        self.__real = cache(compute or (lambda: getattr(_really(module), name)))

    def __call__(self, *values: Any, **named: Any) -> Any:
        waits = _thread.depth > 0 and self.__module.startswith("torch.") and not _is_loaded(self.__module)
        if waits:
            return _Name(self.__module, self.__name, lambda: self.__real()(*values, **named))
        return self.__real()(*values, **named)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind a decorated function of a class, as Python does it."""
        return self if owner is None else self.__real().__get__(owner, kind)

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
        with standing(), _uncollected():
            super().exec_module(module)
        _finish(module)


class _OfOthers(SourceFileLoader):
    """Loads a module that transformers imports, and that is to have the real packages."""

    def exec_module(self, module: ModuleType) -> None:
        _sit()
        with standing(depth=0):
            super().exec_module(module)


class _OfTorch(SourceFileLoader):
    """Loads a module of torch that has a replacement."""

    def exec_module(self, module: ModuleType) -> None:
        with _uncollected():
            super().exec_module(module)
        _finish(module)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do not look for reference cycles in the block: imports make many objects, and few of them are garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _disable_dynamo(function: Callable[..., Any] | None = None, recursive: bool = True) -> Callable[..., Any]:
    """Have torch's compiler not compile the function, if somebody imports it: without it nothing is compiled.

    torch decorates its optimizers with this, and would import its compiler to call them the first time.
    """
    if function is None:
        return partial(_disable_dynamo, recursive=recursive)
    disabled = cache(lambda: sys.modules["torch._dynamo"].disable(function, recursive, wrapping=False))

    @wraps(function)
    def inner(*values: Any, **named: Any) -> Any:
        return (disabled() if _is_loaded("torch._dynamo") else function)(*values, **named)

    return inner


def _is_dtensor(value: object) -> bool:
    """Return whether ranks share the tensor, without importing its class for one that is none."""
    return _Name("torch.distributed.tensor", "DTensor").__instancecheck__(value)


def _check_with(check: Callable[..., None]) -> Callable[..., None]:
    """Return `check` (error, condition, message), which imports sympy, for what is no plain True."""

    @wraps(check)
    def checked(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            check(error_type, cond, message)

    return checked


def _unwrap(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return `unwrap` (model), which imports accelerate, for what is no model of transformers: one wraps nothing."""

    @wraps(unwrap)
    def unwrapped(model: Any, recursive: bool = False) -> Any:
        if not recursive and isinstance(model, sys.modules["transformers.modeling_utils"].PreTrainedModel):
            return model
        return unwrap(model, recursive=recursive)

    return unwrapped


def _finish(module: ModuleType) -> None:
    """Put the functions in place that import nothing, or do not compute the same again."""
    for name, replacement in _REPLACEMENTS.get(module.__name__, {}).items():
        if name in vars(module):
            vars(module)[name] = replacement(vars(module)[name])
    if module.__name__ in _LARGE:
        gc.freeze()


_LARGE = ("torch", "transformers.modeling_utils")
"""Modules whose imports make most of the objects of a process. They stay, and no later collection looks at them."""
_REPLACEMENTS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "torch": {"_check_with": _check_with},
    "torch._compile": {"_disable_dynamo": lambda _: _disable_dynamo},
    "transformers.distributed.utils": {"is_dtensor": lambda _: _is_dtensor},
    "transformers.modeling_utils": {"unwrap_model": _unwrap},
    "transformers.utils.import_utils": {
        # It reads the source of all models twice: its cache has 128 places, and transformers 400 folders.
        "create_import_structure_from_path": lambda read: cache(read.__wrapped__),
        # It splits a source into lines, and keeps those from the last that begins with __all__.
        "fetch__all__": lambda fetch: lambda text: fetch(text[text.rfind("\n__all__") + 1 :]),
    },
}
"""Module -> its functions that are replaced -> the replacement, made from the function."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_theirs = name.partition(".")[0] == "transformers"
        if not is_theirs and _thread.depth == 0 and name not in _REPLACEMENTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        if _thread.depth > 0 and _waits(name):
            spec.loader = _StandLoader(spec.loader.path)
        else:
            loader = _OfTransformers if is_theirs else _OfTorch if name in _REPLACEMENTS else _OfOthers
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


def _waits(name: str) -> bool:
    """Return whether this is a delayed module, or one inside, and nobody has imported it."""
    outer = name
    while outer:
        if outer in DELAYED:
            return not _is_loaded(outer)
        outer = outer.rpartition(".")[0]
    return False


class _Thread(threading.local):
    depth = 0
    """How many modules of transformers this thread is importing, each from the one before."""

    def __init__(self) -> None:
        self.standing: list[str] = []
        """The modules that stand-ins stand for at the moment."""


_thread = _Thread()
_finder = _Finder()


def are_on() -> bool:
    """Return whether imports are delayed now."""
    return _finder in sys.meta_path


@contextmanager
def delayed() -> Iterator[None]:
    """Let transformers' imports in this block wait until something uses them."""
    if are_on() or os.environ.get(SWITCH) == "eager":
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
        stand = sys.modules.get(name)
        if isinstance(stand, _Stand):
            del sys.modules[name]
            above, _, last = name.rpartition(".")
            if above and vars(sys.modules[above]).get(last) is stand:
                delattr(sys.modules[above], last)


def _really(name: str) -> ModuleType:
    """Return the module itself, imported now if nobody has done that."""
    _sit()
    with standing(depth=0):
        return import_module(name)


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not isinstance(module, _Stand)
