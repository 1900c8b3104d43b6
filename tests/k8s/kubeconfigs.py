"""The kubeconfig that leads to a cluster of the tests."""

from __future__ import annotations

import json
from pathlib import Path


def kubeconfig(path: Path, address: str) -> Path:
    """Write a kubeconfig with the contexts good and expired."""
    contexts = {"good": "good", "expired": "old"}
    text = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "users": [{"name": name, "user": {"token": token}} for name, token in contexts.items()],
        "contexts": [
            {"name": name, "context": {"cluster": "here", "user": name, "namespace": "ml"}} for name in contexts
        ],
        "current-context": "good",
    }
    path.write_text(json.dumps(text), "utf-8")
    return path
