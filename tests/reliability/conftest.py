"""One fork server for all files of this folder."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from harness import Server

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: the runs of these tests must not inherit that
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The process that forks trials."""
    made = Server()
    yield made
    made.close()
