"""Plans find the rates of this machine in the cache: no test measures them by the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_rates import known_rates

from whet.plan import rates


@pytest.fixture(autouse=True)
def kept_rates(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds rates of this machine, as if it had been measured before."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    rates.keep(known_rates(key=rates.key_here()))
    return cache
