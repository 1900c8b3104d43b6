"""What the guides' examples name, in a folder of its own: small models, small data sets, no network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for _folder in ("rules", "train"):  # the stand-ins of the docs' examples, and models and rows
    sys.path.append(str(Path(__file__).resolve().parents[1] / _folder))


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `bert-base-uncased`, `distilbert-base-uncased` and `squad` can be found."""
    from stand_ins import write_stand_ins

    folder = tmp_path_factory.mktemp("stand-ins")
    write_stand_ins(folder)
    return folder


@pytest.fixture
def in_stand_ins(stand_ins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder, as the working directory, with caches elsewhere."""
    monkeypatch.chdir(stand_ins)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return stand_ins
