"""Texts of settings for the reference: what a dataclass's field has as help is the docstring of its attribute."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Gives fields of the form `name: type = field(default=..., metadata={"help": ...})` their text and default."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read the call of dataclasses.field that is the value of an attribute."""
        try:
            call = ast.parse(str(attr.value), mode="eval").body
        except SyntaxError:
            return
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "field"):
            return
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if isinstance(metadata := given.get("metadata"), ast.Dict):
            for key, value in zip(metadata.keys, metadata.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "help" and attr.docstring is None:
                    attr.docstring = griffe.Docstring(_text(value), parent=attr)
        if "default" in given:
            attr.value = ast.unparse(given["default"])


def _text(value: ast.expr) -> str:
    """Return a string, or the fixed parts of one that is put together when the module is loaded."""
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    return str(value.value) if isinstance(value, ast.Constant) else "..."
