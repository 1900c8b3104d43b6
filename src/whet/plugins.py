"""The registry of plug-ins: each file of a folder is one, and only those that a run wants are imported.

Methods, optimizers and families of models are plug-ins: to add a file is to add one. What decides whether a run wants
it stands in a constant of its source. That is read here without an import, which would load torch and the others.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def constants(package: str, name: str) -> Mapping[str, Any]:
    """Return the syntax tree of this constant in each file of a package that has it, by the name of the module.

    The constant is `NAME = ...` on one line, or ends with the first line that is a closing bracket alone.
    """
    spec = find_spec(package)
    assert spec is not None
    paths = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for folder in map(Path, spec.submodule_search_locations or ())
        for path in folder.rglob("*.py")
    }
    found = {module: _constant(path.read_text("utf-8"), name) for module, path in sorted(paths.items())}
    return {module: tree for module, tree in found.items() if tree is not None}


def _constant(source: str, name: str) -> Any:
    _, begin, rest = source.partition(f"\n{name} = ")
    first, _, _ = rest.partition("\n")
    text = f"{rest.partition(_END)[0]}{_END}" if first.endswith("(") else first
    return ast.parse(text, mode="eval").body if begin else None


_END = "\n)\n"


def load(package: str, module: str) -> Any:
    """Return a module of a package of plug-ins, imported now if nobody has wanted it so far."""
    return import_module(f"{package}.{module}")
