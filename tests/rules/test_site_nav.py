"""The site (`make docs`) leaves out no page: each is in its navigation, and everything that it names exists.

Links between the pages are tested in test_docs_links.py, what only a built site shows in tests/site.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


def named(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named(part)


def joined() -> dict[str, str]:
    """Return the pages outside of docs/ that join the site, and their names there."""
    tree = ast.parse((ROOT / "tools/site/pages.py").read_text("utf-8"))
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(values["JOINED"]) | {"": ast.literal_eval(values["REFERENCE"])}


def test_every_page_is_in_the_navigation_once() -> None:
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    decisions = {name for name in docs if re.match(r"decisions/\d", name)}  # listed on a page of their own
    assert sorted(named(SITE["nav"])) == sorted((docs - decisions) | set(joined().values()))


def test_files_of_the_site_exist() -> None:
    theme = ROOT / SITE["theme"]["custom_dir"]
    assets = [*SITE["extra_css"], *SITE["extra_javascript"], SITE["theme"]["favicon"]]
    files = [*(theme / name for name in assets), *(ROOT / name for name in (*SITE["hooks"], *filter(None, joined())))]
    assert [str(path) for path in files if not path.is_file()] == []


def test_the_site_names_no_font_or_script_of_the_network() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert SITE["theme"]["font"] is False
    assert "://" not in re.sub(r"#.*", "", text)
