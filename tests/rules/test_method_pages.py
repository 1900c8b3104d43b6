"""Every page of docs/methods answers the same questions, under the same labels, and names a command that measures."""

import re
from pathlib import Path

import pytest
from markdown_page import blocks, commands

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "methods"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
LABELS = ["What", "Why", "Same result", "When it hurts", "Source", "Measured"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_every_part_in_order(page: Path) -> None:
    found = re.findall(r"^\*\*([\w ]+)\*\*:", page.read_text("utf-8"), re.MULTILINE)
    assert [label for label in found if label in LABELS] == LABELS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_was_measured_names_its_command(page: Path) -> None:
    text = page.read_text("utf-8")
    at = text[: text.index("**Measured**:")].count("\n") + 1
    below = [block for block in blocks(page) if block.line > at and block.language == "bash"]
    words = [word for block in below for command in commands(block.text) for word in command]
    assert any(re.match("bench-|benchmarks/", word) for word in words)


def test_the_overview_links_every_page() -> None:
    overview = (FOLDER / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in overview] == []
