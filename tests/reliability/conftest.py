"""One fork server for all files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The process that forks trials."""
    made = Server()
    yield made
    made.close()
