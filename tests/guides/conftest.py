"""The folder of what the guides' examples name, as the place where a test runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_stand_ins(stand_ins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder, as the working directory, with caches elsewhere."""
    monkeypatch.chdir(stand_ins)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return stand_ins
