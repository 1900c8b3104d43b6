"""A cluster of the tests, and the kubeconfig that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import crd_schema
import pytest
from api_server import Cluster, serve
from kubeconfigs import kubeconfig


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose kubeconfig is the usual one; contexts: good, in namespace ml, and expired."""
    crd_schema.folder()  # skips here: in a thread of the server it would fail
    held = Cluster()
    server = serve(held)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", address)))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield held
    server.shutdown()
    server.server_close()
