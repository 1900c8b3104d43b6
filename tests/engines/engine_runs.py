"""What the tests of several engines share."""

from __future__ import annotations

import socket
import time
from urllib.error import URLError
from urllib.request import urlopen


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address: str, within_s: float) -> None:
    """Wait until an HTTP server answers there."""
    until = time.monotonic() + within_s
    while True:
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, ConnectionError, TimeoutError):
            if time.monotonic() > until:
                raise
            time.sleep(0.3)
