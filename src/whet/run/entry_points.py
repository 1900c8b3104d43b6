"""The table of all public functions of other libraries through which `whet run` gets the models of a script.

`site/sitecustomize.py` calls `install` at the start of each Python process below `whet run`. Nothing is imported for
it: an entry point is replaced when the script itself imports the module that holds it. The replacement calls the
function that it replaces, once, with the same arguments, and returns what that returns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CHANGING = "whet.run.changing"
Around = Callable[..., Any]
"""Takes the replaced function and its arguments; returns its result."""


@dataclass(frozen=True)
class EntryPoint:
    """A function that is replaced once its module is imported."""

    module: str
    """Where the function is defined."""
    function: str
    """Its name, after that of its class if it has one."""
    used_by: str
    """Whose scripts call it."""
    does: str
    """What `whet run` does in it, next to calling it."""
    around: str
    """The function of `whet.run.changing` that does so."""
    brings_models: bool = True
    """Whether whet may see a model here first; a function that brings none is alone until whet has seen one."""

    @property
    def name(self) -> str:
        """The full name."""
        return f"{self.module}.{self.function}"


TABLE = (
    EntryPoint(
        "accelerate.accelerator",
        "Accelerator.prepare_model",
        "loops of accelerate, transformers' Trainer, and those of TRL, SetFit and sentence-transformers",
        "the model is changed after two steps; at once if it is evaluated alone",
        "prepare_model",
    ),
    EntryPoint(
        "transformers.trainer",
        "Trainer.train",
        "scripts with transformers' Trainer, or one that inherits from it",
        "of a training step the loss alone is read: large tables of logits are not made",
        "train",
    ),
    EntryPoint(
        "lightning.pytorch.trainer.trainer",
        "Trainer.fit",
        "scripts with Lightning",
        "the module is changed after two steps",
        "fit",
    ),
    EntryPoint(
        "pytorch_lightning.trainer.trainer",
        "Trainer.fit",
        "the same, by its older name",
        "the module is changed after two steps",
        "fit",
    ),
    EntryPoint(
        "spacy.language",
        "Language.update",
        "spaCy's loops, and `spacy train`",
        "the pipeline is changed after two updates",
        "update",
    ),
    EntryPoint(
        "torch",
        "save",
        "scripts that pickle a model",
        "the pickle holds the model as the script has it, and loads without whet",
        "save",
        brings_models=False,
    ),
)
"""All entry points. `docs/run.md` prints it."""


def as_markdown() -> list[str]:
    """Return the lines of the table in `docs/run.md`."""
    rows = [f"| `{one.name}` | {one.used_by} | {one.does} |" for one in TABLE]
    return ["| function | called by | what happens there |", "|---|---|---|", *rows]


def install() -> None:
    """Have each entry point replaced when its module is imported, or now if it is there already."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for one in TABLE:
        if one.module in sys.modules:
            _replace(sys.modules[one.module], one)


class _Finder(MetaPathFinder):
    """Finds the modules of the table as the other finders do, and has their loader replace the entry points."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if all(one.module != name for one in TABLE):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads a module by its own loader, which the module then has again, and replaces its entry points."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        for one in TABLE:
            if one.module == module.__name__:
                _replace(module, one)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _replace(module: ModuleType, entry: EntryPoint) -> None:
    """Put a function around that of the entry point; a class without it, of another release, stays as it is."""
    class_name, _, function_name = entry.function.rpartition(".")
    owner = getattr(module, class_name, None) if class_name else module
    function = vars(owner).get(function_name) if isinstance(owner, type | ModuleType) else None
    if not callable(function):
        return

    @functools.wraps(function)
    def around(*given: Any, **named: Any) -> Any:
        if not entry.brings_models and _CHANGING not in sys.modules:
            return function(*given, **named)
        return getattr(import_module(_CHANGING), entry.around)(function, *given, **named)

    setattr(owner, function_name, around)
