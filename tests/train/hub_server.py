"""A server on this machine that speaks as much of the Hub's protocol as an upload needs; keeps what it is sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """`repos` are the created repositories, `files` what was committed, `tokens` who asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.tokens: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.server.repos.append(asked)
            name = f"me/{asked['name']}"
            self._answer({"url": f"{self.server.address}/{name}", "id": "1", "name": name})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                self._take(json.loads(line))
            self._answer({"commitUrl": f"{self.server.address}/me/x/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "me/x", "sha": "0" * 40, "siblings": [], "tags": [], "private": False, "name": "me"})

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["key"] == "file":
            self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        elif entry["key"] == "header":
            self.server.messages.append(entry["value"]["summary"])

    def _answer(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[Hub]:
    """Yield a running server."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
