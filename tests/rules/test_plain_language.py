"""Pages, docstrings, comments and messages avoid words that make a reader stop: the list of banned words and phrases.

It covers the pages and all packages.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
PACKAGES = (
    "bench", "cli", "config", "data", "dist", "doctor", "hardware", "hf", "jobs", "kernels", "kubernetes",
    "launch", "methods", "migrate", "models", "objectives", "optim", "own_loop", "plan", "precision", "report",
    "engine", "export", "run", "store", "tasks", "watch",
)  # fmt: skip
MODULES = (
    "__init__",
    "__main__",
    "card",
    "console",
    "errors",
    "json_output",
    "lasting",
    "log",
    "optional",
    "paths",
    "strict_json",
    "system",
)
BANNED = {
    r"told": "logged, reported, said",
    r"beside": "next to, compared with",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:go|goes|going|went|gone) on\b": "continue, resume",
    r"(?:is|are|was|to) (?:to )?be had": "is available",
    r"as (?:it|they) comes?\b": "by default, unchanged",
    r"whole(?! numbers?)": "complete",
    r"in every bit": "bitwise",
    r"(?:on the spot|behind (?:its|the run's?) back)": "synchronously, in the background",
    r"(?:none|nothing|empty|(?:[a-z]+error)|raises?) where": "if",
}
"""Pattern -> what to write instead."""
_PATTERNS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in BANNED.items()}


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of fenced blocks and generated tables, without code in backticks."""
    fenced = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


def _texts(module: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and the strings of several words of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(module.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"`[^`]*`", "", line)


def _comments(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a C++ file."""
    for number, line in enumerate(source.read_text("utf-8").splitlines(), start=1):
        yield number, line.partition("//")[2]


def _covered() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]
    package = ROOT / "src" / "whet"
    for name in PACKAGES:
        yield from sorted(path for path in (package / name).rglob("*") if path.suffix in {".py", ".h", ".cpp"})
    yield from (package / f"{name}.py" for name in MODULES)


def faults(path: Path) -> list[str]:
    """Return each banned word in the file with its line and what to write instead."""
    read = {".md": _prose, ".py": _texts}.get(path.suffix, _comments)
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{number}: {found.group()!r}; write: {instead}"
        for number, line in read(path)
        for pattern, instead in _PATTERNS.items()
        for found in pattern.finditer(line)
    ]


def test_texts_use_no_banned_words() -> None:
    paths = [*_covered()]
    assert len(paths) > 100
    assert [fault for path in paths for fault in faults(path)] == []


def test_every_package_is_covered() -> None:
    package = ROOT / "src" / "whet"
    assert {path.name for path in package.iterdir() if (path / "__init__.py").exists()} == set(PACKAGES)


def test_banned_words_are_found_in_prose_and_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("The run goes on.\n```text\nIt goes on.\n```\nThe option `whole`.\n", "utf-8")
    module.write_text('"""Return None where it is told."""\nx = 1  # no whole checkpoint\n', "utf-8")
    assert [fault.partition(";")[0] for fault in faults(page)] == ["page.md:1: 'goes on'"]
    assert len(faults(module)) == 3
