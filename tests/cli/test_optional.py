"""Packages that are missing, and packages that are there and cannot be imported: two faults, each with its own fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.optional import require


def _fix(module: str, install: str, environment: str = "") -> str:
    with pytest.raises(ConfigError) as refused:
        require(module, needed_for="a test", install=install, environment=environment)
    return refused.value.problems[0].fix


def test_a_package_that_is_missing_is_installed() -> None:
    assert _fix("whet_no_such_package.part", "some-name") == "run: pip install some-name"
    assert _fix("whet_no_such_package", "some-name", "A=0 ") == "run: A=0 pip install some-name"


@pytest.mark.parametrize(("install", "again"), [("some-name", "some-name"), ("'whet-train[tag]'", "whet_damaged")])
def test_a_package_that_cannot_be_imported_is_installed_again(
    install: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip install alone would answer that it is there."""
    (tmp_path / "whet_damaged.py").write_text("import whet_no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _fix("whet_damaged", install).endswith(f"run: pip install --force-reinstall --no-deps {again}")
