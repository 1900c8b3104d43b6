"""The texts of whet's errors as the source holds them, and the names that they use."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import whet

_PACKAGE = Path(whet.__file__).parent
_PARTS = ("what", "why", "fix")
PLACEHOLDER = "\N{HORIZONTAL ELLIPSIS}"
"""What stands for a part that is only known when the error happens."""
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)(?:[ =]([\w.]+))?")


@dataclass(frozen=True)
class Text:
    """One text, or one branch of it, and where it stands."""

    place: str
    part: str
    text: str

    def flags(self) -> list[tuple[str, str]]:
        """Return each flag that the text names, with the word after it."""
        return [(name, word) for name, word in _FLAG.findall(self.text)]


@functools.cache
def all_texts() -> list[Text]:
    """Return the texts of all errors, and every other text that names a flag (tables of fixes, helpers' arguments)."""
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        skipped = _docstrings(tree)
        place = path.relative_to(_PACKAGE).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg in _PARTS:
                found += [Text(f"{place}:{node.value.lineno}", node.arg, text) for text in _strings(node.value)]
            elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
                texts = [text for text in _strings(node) if "--" in text]
                found += [Text(f"{place}:{node.lineno}", "other", text) for text in texts]
    return found


def _docstrings(tree: ast.AST) -> set[int]:
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _strings(node: ast.AST) -> Iterator[str]:
    """Return the texts that an expression can become, f-strings with placeholders."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from _strings(node.body)
        yield from _strings(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from _strings(node.left)
        yield from _strings(node.right)


def choices(kind: Any) -> set[str]:
    """Return the words that an option takes if it takes nothing else; none for numbers and free text."""
    if get_origin(kind) is Literal:
        return {str(value) for value in get_args(kind)}
    members = [choices(member) for member in get_args(kind) if member is not type(None)]
    return set().union(*members) if members and all(members) else set()
