"""torch renames its collectives from release to release: only `dist/` calls them."""

from __future__ import annotations

import ast
from pathlib import Path

import whet

_ROOT = Path(whet.__file__).parent
_ASKS = {"config/ranks.py", "launch/elastic.py"}
"""The first asks whether a process group exists, by the modules that are loaded; the second starts torch's agent."""


def _uses(path: Path) -> list[str]:
    """Return what a file uses of torch.distributed, in imports and in dotted names."""
    tree = ast.parse(path.read_text("utf-8"))
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.startswith("torch.distributed")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [node.module or "" for one in node.names if "distributed" in f"{node.module}.{one.name}"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed."):
            found.append(ast.unparse(node))
    return found


def test_nothing_outside_of_dist_calls_torch_distributed() -> None:
    files = {path.relative_to(_ROOT).as_posix(): path for path in _ROOT.rglob("*.py")}
    others = {name: _uses(path) for name, path in files.items() if not name.startswith("dist/") and name not in _ASKS}
    assert {name: uses for name, uses in others.items() if uses} == {}
    assert any(_uses(path) for name, path in files.items() if name.startswith("dist/"))
