"""The tables of docs/methods.md, made from the cards. Run `python -m tests.rules.methods_page` to write them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from whet.card import Card
from whet.methods.order import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "methods.md"
_SOURCE = ROOT / "src"


def written() -> str:
    """The page with its tables made again."""
    text = PAGE.read_text("utf-8")
    for name, table in (("techniques", techniques()), ("order", order())):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marks.search(text), f"the page has no place for the table of {name}"
        text = marks.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def cards() -> list[Card]:
    """Every card of the package: those that run by default first, then by what they improve, then by name."""
    files = [path for path in _SOURCE.rglob("*.py") if re.search("^CARD = Card", path.read_text("utf-8"), re.MULTILINE)]
    names = (".".join(path.relative_to(_SOURCE).with_suffix("").parts) for path in sorted(files))
    found: list[Any] = [import_module(name).CARD for name in names]
    return sorted(found, key=lambda card: (card.asked_by != "default", card.improves, card.name))


def techniques() -> str:
    """One row for each card."""
    rows = [
        (
            f"[{card.name}]({card.page})" if card.page else card.name,
            _asked(card),
            card.does,
            card.improves,
            card.same_result,
            card.hurts,
        )
        for card in cards()
    ]
    return _table(("technique", "setting", "what it does", "improves", "same loss", "when to leave it out"), rows)


def order() -> str:
    """The methods that change the model, in the order they are applied."""
    rows = [(method.CARD.name, method.STAGE.name.lower(), f"`{_file(method)}`") for method in METHODS]
    return _table(("method", "stage", "file in `src/whet/methods`"), rows)


def _asked(card: Card) -> str:
    if card.asked_by == "default":
        return "default"
    if card.asked_by == "methods":
        return f"`methods {card.name}`"
    return ", ".join(f"`{name}`" for name in card.asked_by.split(", "))


def _file(method: Any) -> str:
    return Path(method.__file__).relative_to(_SOURCE / "whet" / "methods").as_posix()


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
