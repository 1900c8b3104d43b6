"""A file that a page names in backticks exists: in the repository, in the package, or next to the page."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
_OF_RUNS = re.compile(r"^(?:out|bench|checkpoint-|abandoned-|runs|xquad|whet-demo|\.ci)")
"""Folders that runs write, or that users have."""
_NOT_FILES = re.compile(
    r"^(?:bert|distilbert|rajpurkar|linear_lr|rewards/|logps/|torch/|dist/|launch/|kubernetes/|plan/|report/)"
)
"""Names of models, operators and metrics, and folders that are planned."""


def missing(text: str, folder: Path) -> list[str]:
    """Return the named files that do not exist."""
    package = ROOT / "src" / "whet"
    roots = (ROOT, package, *package.iterdir(), ROOT / "tools", folder)
    named = {name for name in _NAMED.findall(text) if not _OF_RUNS.match(name) and not _NOT_FILES.match(name)}
    return sorted(name for name in named if not any((root / name).exists() for root in roots))


def test_files_that_the_docs_name_exist() -> None:
    found = {page.name: names for page in PAGES if (names := missing(page.read_text("utf-8"), page.parent))}
    assert found == {}


def test_missing_files_in_the_docs_are_found() -> None:
    assert missing("see `data/store.py`, `docs/`, `data/gone.py` and `out/model`", ROOT) == ["data/gone.py"]
