"""A cache that leaves no traces outside of the test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are cached in the test's folder, in child processes too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
