"""Code in a process of its own whose files may not grow: the system refuses each line, as a full disk does."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path


def run_without_room(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Return what became of this code, which finds the folder in sys.argv[1]."""
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )  # fmt: skip
