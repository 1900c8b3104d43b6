"""A hub on this machine: as much of its HTTP interface as huggingface_hub's client needs to make, fill and read it.

The client is the real one. What it commits, and what it can download, is in `repositories`, by name and path, as bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import RepoCard, constants
from transformers.utils import hub as transformers_hub

from whet.models.loading import hub as hub_names

TOKEN = "hf_" + "a" * 34
COMMIT = "0" * 40


class Hub:
    """Repositories by name, and what the clients did."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.branches: list[str] = []
        """Of each commit."""
        self.objects: dict[str, bytes] = {}
        self.refuses_commits = False
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.url = ""

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Apply the lines of a commit: its message, files with their content, large files, deletions."""
        files = self.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)


def _odd_names(card: str) -> list[str]:
    """The data sets and base models of a card which the hub refuses."""
    data = RepoCard(card, ignore_metadata_errors=True).data.to_dict()
    bases = data.get("base_model", [])
    named = [*data.get("datasets", []), *(bases if isinstance(bases, list) else [bases])]
    return [one for one in named if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", one)]


def _id_of(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, content: Any = None, status: int = 200) -> None:
            self._send(json.dumps({} if content is None else content).encode(), status, "application/json")

        def _send(self, body: bytes, status: int, kind: str, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _file(self, path: str) -> None:
            name, _, place = path.removeprefix("/").partition("/resolve/")
            content = hub.repositories[name][place.partition("/")[2]]
            self._send(content, 200, "application/octet-stream", ETag=f'"{_id_of(content)}"', X_Repo_Commit=COMMIT)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                pieces = []
                while size := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _may(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self._answer({"error": "Invalid username or password."}, 401)
            return False

        def do_HEAD(self) -> None:
            path = self.path.partition("?")[0]
            self._file(path) if "/resolve/" in path else self._answer()

        def do_PUT(self) -> None:
            content = self._body()
            hub.objects[hashlib.sha256(content).hexdigest()] = content
            self._answer()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked = re.match("/api/models/([^/]+/[^/]+)", path)
            if asked is not None and asked[1] not in hub.repositories:
                self._send(b"{}", 404, "application/json", X_Error_Code="RepoNotFound")
            elif path.startswith("/api/models/") and "/tree/" in path:
                name = path.removeprefix("/api/models/").partition("/tree/")[0]
                files = hub.repositories[name]
                found = [(one, files[one]) for one in files]
                self._answer(
                    [{"type": "file", "path": one, "size": len(held), "oid": _id_of(held)} for one, held in found]
                )
            elif path.startswith("/api/models/"):
                name = path.removeprefix("/api/models/").partition("/revision/")[0]
                siblings = [{"rfilename": one} for one in hub.repositories[name]]
                self._answer({"id": name, "sha": COMMIT, "siblings": siblings})
            elif "/resolve/" in path:
                self._file(path)
            else:
                self._answer()

        def do_POST(self) -> None:
            content, path = self._body(), self.path.partition("?")[0]
            if not self._may():
                return
            if path == "/api/repos/create":
                asked = json.loads(content)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
                is_new = name not in hub.repositories
                hub.repositories.setdefault(name, {})
                self._answer({"url": f"{hub.url}/{name}"}, 200 if is_new else 409)
            elif path == "/api/validate-yaml":
                odd = _odd_names(json.loads(content)["content"])
                errors = [{"message": f"{one} is no name of the hub"} for one in odd]
                self._answer({"errors": errors, "warnings": []})
            elif "/preupload/" in path:
                files = json.loads(content)["files"]
                modes = [
                    {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                     "shouldIgnore": False, "oid": None}
                    for one in files
                ]  # fmt: skip
                self._answer({"files": modes, "commitOid": COMMIT})
            elif path.endswith("/info/lfs/objects/batch"):
                wanted = json.loads(content)["objects"]
                href = f"{hub.url}/put"
                found = [{**one, "authenticated": True, "actions": {"upload": {"href": href}}} for one in wanted]
                self._answer({"transfer": "basic", "objects": found})
            elif "/commit/" in path:
                hub.may_commit.wait(30)
                if hub.refuses_commits:
                    self._answer({"error": "the disk of the hub is full"}, 507)
                    return
                name, _, branch = path.removeprefix("/api/models/").partition("/commit/")
                hub.branches.append(branch)
                hub.commit(name, [json.loads(line) for line in content.splitlines() if line.strip()])
                oid = f"{len(hub.messages):040d}"
                self._answer({"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})
            else:
                self._answer()

    return Handler


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub within the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def taken_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub within the block, which the client of this process takes for the hub."""
    with running() as hub:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url.replace(constants.ENDPOINT, hub.url))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)  # it keeps the address of the hub
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub_names.unreachable.cache_clear()
        yield hub
    hub_names.unreachable.cache_clear()
