"""The names of the methods, read from their files: to import a method would import torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "methods"
BY_NAME = "methods"
"""The setting that asks for methods by name."""


@cache
def method_files() -> dict[str, str]:
    """Return each method's name, which is that of its file or folder, with the last part of its module's name."""
    files = {path.stem: path for path in _FOLDER.glob("*.py")}
    folders = {path.parent.name: path for path in _FOLDER.glob("*/method.py")}
    found = {name: path for name, path in sorted({**files, **folders}.items()) if _card(path) is not None}
    return {name: ".".join(path.relative_to(_FOLDER).with_suffix("").parts) for name, path in found.items()}


@cache
def asked_by() -> dict[str, str]:
    """Return the name on each method's card, with the setting that asks for the method."""
    paths = (_FOLDER / f"{module.replace('.', '/')}.py" for module in method_files().values())
    cards = (_card(path) or {} for path in paths)
    return {str(card.get("name")): str(card.get("asked_by")) for card in cards}


def names_to_ask_for() -> tuple[str, ...]:
    """Return the names that `--methods` takes: those of methods whose card says `asked_by="methods"`."""
    return tuple(name for name, setting in asked_by().items() if setting == BY_NAME)


def _card(path: Path) -> dict[str, object] | None:
    """Return what the file's `CARD = Card(...)` says in plain constants; None if it has none."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CARD"]:
            words = node.value.keywords if isinstance(node.value, ast.Call) else []
            return {word.arg: word.value.value for word in words if word.arg and isinstance(word.value, ast.Constant)}
    return None
