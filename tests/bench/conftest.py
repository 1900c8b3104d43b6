"""A cache and a log that leave no traces outside of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.log import logger


@pytest.fixture(autouse=True)
def _no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are cached in the test's folder, in child processes too; the log goes to this test's standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
