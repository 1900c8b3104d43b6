"""The tables of the docs that are made from the code. Run `python -m tests.rules.methods_page` to write them.

Those of methods.md are made from the cards, that of memory.md from the registry of optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from whet.card import Card
from whet.config.optimizer_names import rows as rows_of_optimizers
from whet.methods.order import methods
from whet.optim import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "methods.md"
OPTIMIZERS_PAGE = PAGE.with_name("memory.md")
_SOURCE = ROOT / "src"
_DTYPES = (torch.float32, torch.bfloat16)
_WIDTH = 4096
"""Rows and columns of the matrix whose state is counted."""


def written(page: Path) -> str:
    """The page with its tables made again."""
    tables = {PAGE: {"techniques": techniques, "order": order}, OPTIMIZERS_PAGE: {"optimizers": optimizers}}
    text = page.read_text("utf-8")
    for name, make in tables[page].items():
        table = make()
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
    """The stages in the order they are applied, each with its methods."""
    stages: dict[str, list[str]] = {}
    for method in methods():
        stages.setdefault(method.STAGE.name.lower(), []).append(method.CARD.name)
    return _table(("stage", "methods"), [(stage, ", ".join(names)) for stage, names in stages.items()])


def optimizers() -> str:
    """One row for each optimizer of the registry; a source stands at its first one."""
    every = rows_of_optimizers()
    first = {row.source: row.name for row in reversed(every)}
    rows = [
        (
            ", ".join(f"`{name}`" for name in (row.name, *row.aliases)),
            f"{row.does} ({_cited(row.source)})" if first[row.source] == row.name else row.does,
            "" if registry.entry(row.name).stands_for else ", ".join(map(_state_bytes(row.name), _DTYPES)),
            "all" if row.reads == "element" else "1",
            ", ".join(f"`{option}`" for option in row.options),
        )
        for row in every
    ]
    head = ("`--optim`", "what", "bytes of state per weight in fp32, bf16", "`--zero_stage`", "`--optim_args`")
    return _table(head, rows)


def _state_bytes(optim: str) -> Callable[[torch.dtype], str]:
    def shown(dtype: torch.dtype) -> str:
        n_bytes = registry.state_bytes(optim, [(_WIDTH, _WIDTH)], dtype=dtype) / _WIDTH**2
        return f"{n_bytes:.2f}".rstrip("0").rstrip(".")

    return shown


def _cited(source: str) -> str:
    """The source, with a link in the place of a paper's number."""
    return re.sub(r"([^;]*?), arXiv:([\d.]+)[^;]*", r"[\1](https://arxiv.org/abs/\2)", source)


def _asked(card: Card) -> str:
    if card.asked_by == "default":
        return "default"
    if card.asked_by == "methods":
        return f"`methods {card.name}`"
    return ", ".join(f"`{name}`" for name in card.asked_by.split(", "))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


if __name__ == "__main__":
    for page in (PAGE, OPTIMIZERS_PAGE):
        page.write_text(written(page), "utf-8")
