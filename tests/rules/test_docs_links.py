"""Links between pages lead to a file and a heading that exist, and pages that the code names exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_page import anchors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "llms.txt")),
    *sorted((ROOT / "skills").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_NAMED = re.compile(r"(?<![\w./])docs/[\w./-]+\.md")


def broken(page: Path) -> list[str]:
    """Return the links of the page that lead nowhere; addresses of other sites are not looked at."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [first or second for first, second in _LINK.findall(text)]
    return [link for link in links if "://" not in link and not _leads_somewhere(link, page)]


def _leads_somewhere(link: str, page: Path) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[a](#a-b-c) [b](#gone) [c](page.md) [d](gone.md) [e](https://example.org)\n", "utf-8")
    assert broken(page) == ["#gone", "gone.md"]


def test_pages_that_the_code_names_exist() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files belong to it")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--", "*.py", "*.cpp", "*.h", "*.toml", "Makefile"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [path for name in listed if (path := ROOT / name).is_file()]
    named = {(path.name, page) for path in files for page in _NAMED.findall(path.read_text("utf-8"))}
    assert sorted(f"{name}: {page}" for name, page in named if not (ROOT / page).exists()) == []
