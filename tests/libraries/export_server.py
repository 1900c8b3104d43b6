"""The script of an export as a server of HTTP, and questions to it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serving(folder: Path, end: signal.Signals = signal.SIGINT) -> Iterator[int]:
    """Run the script of this folder within the block, which `end` stops; give its port."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, str(folder / "serve.py"), "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        server.send_signal(end)
        assert server.wait(30) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def posted(port: int, question: Mapping[str, Any]) -> Any:
    """Return the answer, once the server listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(question).encode())
    for _ in range(300):
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not listen")
