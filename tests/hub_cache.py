"""Models as the hub's client keeps a download: a snapshot of links to the file store next to it."""

from __future__ import annotations

import shutil
from pathlib import Path

COMMIT = "0" * 40


def cached(folder: Path, cache: Path, name: str) -> Path:
    """Lay the folder out in the cache as a download of this name; return the snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    for part in (snapshot, repo / "refs", repo / "blobs"):
        part.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT, "utf-8")
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        place = path.relative_to(folder)
        blob = f"blob-{'-'.join(place.parts)}"
        shutil.copy(path, repo / "blobs" / blob)
        (snapshot / place).parent.mkdir(exist_ok=True)
        (snapshot / place).symlink_to(Path(*[".."] * (1 + len(place.parts))) / "blobs" / blob)
    return snapshot
