"""Models and data for `--auto`, and rates of this machine in the cache: no test measures them by the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_rates import known_rates

from text_tasks import save_encoder
from whet.plan import rates


@pytest.fixture(autouse=True)
def _kept_rates() -> None:
    """Rates of this machine, as if it had been measured before."""
    rates.keep(known_rates(key=rates.key_here()))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder
