"""The methods, read from the cards in their files: to import a method would import torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from whet import plugins

PACKAGE = "whet.methods"
"""Where the files of the methods are."""
BY_NAME = "methods"
"""The setting that asks for methods by name."""


class MethodFile(NamedTuple):
    """Where a method is, and what its card says of who asks for it."""

    module: str
    asked_by: str
    wanted_by: str
    needs: str


@cache
def method_files() -> Mapping[str, MethodFile]:
    """Return the file of each method by the name on its card, in the order of the files."""
    found = {}
    for module, call in plugins.constants(PACKAGE, "CARD").items():
        words = [one for one in call.keywords if isinstance(one.value, ast.Constant)]
        card: dict[str, Any] = {one.arg: one.value.value for one in words}
        found[card["name"]] = MethodFile(module, card["asked_by"], card.get("wanted_by", ""), card.get("needs", ""))
    return found


def names_to_ask_for() -> tuple[str, ...]:
    """Return the names that `--methods` takes: those of methods whose card says `asked_by="methods"`."""
    return tuple(name for name, file in method_files().items() if file.asked_by == BY_NAME)
