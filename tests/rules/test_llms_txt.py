"""`llms.txt` follows its convention (llmstxt.org), links every page, and every link leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "llms.txt").read_text("utf-8")
_OF_DECISIONS = ROOT / "docs" / "decisions"
_OTHER = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "skills/whet/SKILL.md")
_ITEM = re.compile(r"- \[([^\]]+)\]\(([^)]+)\): \S.*")


def test_it_has_a_title_a_quote_and_sections_of_links() -> None:
    lines = TEXT.splitlines()
    assert lines[0] == "# whet"
    assert [line for line in lines if line.startswith("# ")] == lines[:1]
    assert lines[2].startswith("> ")
    _, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    assert sections[-1].startswith("Optional\n"), "what a reader may leave out comes last, under the name for that"
    for section in sections:
        name, blank, *items = section.strip().splitlines()
        assert name
        assert blank == ""
        assert items
        assert [item for item in items if not _ITEM.fullmatch(item)] == []


def test_it_links_every_page_once_and_no_file_that_is_not_there() -> None:
    links = [link for _, link in _ITEM.findall(TEXT)]
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert len(set(links)) == len(links)
    decisions = {_OF_DECISIONS / "README.md"}  # it lists the others
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path.parent != _OF_DECISIONS} | decisions
    assert set(links) == {path.relative_to(ROOT).as_posix() for path in pages} | set(_OTHER)
