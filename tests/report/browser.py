"""A browser without a window, which a pipe asks by its own protocol: what a page shows, logs and loads, and pictures.

https://chromedevtools.github.io/devtools-protocol describes what it understands.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), "")
"""The browser of this machine; "" if it has none."""
_FLAGS = ("--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
          "--disable-background-networking", "--disable-component-update", "--disable-sync",
          "--disable-quic")  # fmt: skip
_WITH_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(handle), fcntl.F_DUPFD, 10) for handle in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from handle 3 and writes to 4."""
_LONGEST_S = 120
_END = b"\0"
"""Of a message."""


class Browser:
    """A running browser with one page, which can be asked until the block ends."""

    def __init__(self, profile: Path) -> None:
        """`profile` is an empty folder of its own."""
        (to_read, ours_to_write), (ours_to_read, to_write) = os.pipe(), os.pipe()
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        pipes = [str(to_read), str(to_write)]
        page = [f"--user-data-dir={profile}", "about:blank"]
        words = [sys.executable, "-c", _WITH_PIPES, *pipes, PATH, *_FLAGS, *as_root, *page]
        self._process = subprocess.Popen(
            words, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._write, self._read = ours_to_write, ours_to_read
        self._buffer, self._n, self._session = b"", 0, None
        self._events: list[dict[str, Any]] = []
        pages = self._ask("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{part}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, place: Path | str, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Show a file or an address in a light or a dark system; narrow windows are those of a phone."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
                  deviceScaleFactor=1)  # fmt: skip
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self._ask("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def find(self, script: str) -> Any:
        """Return what this function finds in the page."""
        found = self._ask("Runtime.evaluate", expression=f"({script})()", returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """What the page has logged since it was opened, and the errors that it did not catch."""
        named = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(one["params"]) for one in self._events if one["method"] in named]

    @property
    def loaded(self) -> list[str]:
        """The addresses that the page asked for since it was opened, its own among them."""
        sent = [one["params"]["request"]["url"] for one in self._events if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def picture(self, path: Path, *, scale: float = 1, height: float | None = None) -> None:
        """Write what the page shows as PNG, all of it or so much of its beginning."""
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": scale}
        taken = self._ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def print_to(self, path: Path) -> None:
        """Write the page as PDF, as it is printed."""
        printed = self._ask("Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(printed["data"]))

    def _ask(self, method: str, **params: Any) -> Mapping[str, Any]:
        self._n += 1
        number = self._n
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + _END)
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _wait_for(self, method: str) -> None:
        while not any(one["method"] == method for one in self._events):
            self._next()

    def _next(self) -> dict[str, Any]:
        """Return the next message; events are kept."""
        until_s = time.monotonic() + _LONGEST_S
        while _END not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(until_s - time.monotonic(), 0))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, f"the browser is silent (exit code {self._process.poll()})"
            self._buffer += part
        message, self._buffer = self._buffer.split(_END, 1)
        found = json.loads(message)
        if "method" in found:
            self._events.append(found)
        return found
