"""The page about unmodified scripts has the table of entry points, and each of these exists where it is said to be."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from whet.run import changing, entry_points
from whet.run.entry_points import TABLE, EntryPoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run.md"


def test_the_page_has_the_table_of_entry_points() -> None:
    found = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    assert found == entry_points.as_markdown()


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_an_entry_point_is_a_public_function_of_its_library(entry: EntryPoint) -> None:
    assert callable(getattr(changing, entry.around))
    package = entry.module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-libraries installs it")
    class_name, _, function = entry.function.rpartition(".")
    module = importlib.import_module(entry.module)
    owner = getattr(module, class_name) if class_name else module
    assert not any(part.startswith("_") for part in entry.name.split("."))
    assert callable(vars(owner)[function])
