"""The tables of docs/transformers.md, made from what the package does. Run this file to write them into the page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import transformers

from whet.config.names.not_honoured import NOT_HONOURED
from whet.config.names.status import FieldStatus, statuses
from whet.train.compat.method_table import ARGUMENTS, METHODS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def written() -> str:
    """The page with its tables made again."""
    text = PAGE.read_text("utf-8")
    for name, table in (("methods", methods()), ("arguments", arguments()), ("fields", fields())):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marks.search(text), f"the page has no place for the table of {name}"
        text = marks.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def methods() -> str:
    """Each public method of transformers' Trainer: a call, an override, what differs."""
    rows = [
        (f"`{name}`", "refused" if method.refused else "works", method.override, method.refused or method.note)
        for name, method in sorted(METHODS.items())
    ]
    return _table(("method", "call", "override", "what differs, or what to do instead"), rows)


def arguments() -> str:
    """Each argument of the constructor."""
    return _table(
        ("argument", "status", "what differs"), [(f"`{name}`", "works", note) for name, note in ARGUMENTS.items()]
    )


def fields() -> str:
    """Each field of transformers' TrainingArguments: works, translated, or refused with what to do instead."""
    known = statuses()
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)} | NOT_HONOURED.keys()
    rows = [_field(known[name]) for name in sorted(names)]
    return _table(("field", "status", "what becomes of it, or what to do instead"), rows)


def _field(known: FieldStatus) -> tuple[str, str, str]:
    passes = " or ".join(f"`{value!r}`" for value in known.passes)
    note = "" if known.outcome == "works" else known.note + (f" (passes as {passes})" if passes else "")
    return f"`{known.name}`", known.outcome, note


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
