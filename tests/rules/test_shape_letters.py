"""CONTRIBUTING.md names the shape letters that the code uses, and no others."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _letters() -> str:
    """The section of the page that explains the letters."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return text.partition("\n## Shape letters\n")[2].partition("\n## ")[0]


def test_shape_letters_of_the_page_are_used_by_the_code() -> None:
    page = _letters()
    named = set(re.findall(r"^\| ([A-Z]) \|", page, re.MULTILINE))
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "src" / "whet").rglob("*.py"))
    used = {letter for shape in re.findall(r"\([\w+, ]+\)", code) for letter in re.findall(r"\b[A-Z]\b", shape)}
    assert named, "the page has no table of letters"
    assert named - used == set()


def test_shape_letters_of_the_kernels_are_on_the_page() -> None:
    page = _letters()
    for path in (ROOT / "src" / "whet" / "kernels").rglob("*.py"):
        for shape in re.findall(r"\((?:[A-Z0-9] ?[A-Z]?, ?)+[A-Z]?\)", path.read_text("utf-8")):
            assert set(re.findall(r"[A-Z]", shape)) <= set(re.findall(r"\b[A-Z]\b", page)), (path.name, shape)
