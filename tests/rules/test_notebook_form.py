"""The notebooks of the examples are complete, without outputs, and begin with their installation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
TASKS = {"qa", "classify", "tag", "lm", "embed"}


def test_each_task_has_a_notebook_that_the_page_names() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*")} == TASKS
    page = (NOTEBOOKS.parent / "README.md").read_text("utf-8")
    assert set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", page)) == TASKS


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_notebook_installs_first_and_is_kept_without_outputs(name: str) -> None:
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    first = "".join(code[0]["source"])
    assert "torch==2.13.0" in first, "the version that the README installs"
    assert "%pip install" in first
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in code)
