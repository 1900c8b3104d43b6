"""Runs a script of the skill as an agent does, with a `whet` that begins at once, and returns the object it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from warm_whet import Warm

SKILL = Path(__file__).resolve().parents[1] / "skills" / "whet"
SCRIPTS = SKILL / "scripts"
_LONGEST_S = 300
TRAINING = ("--use_cpu", "--report_to", "none", "--precision", "fp32", "--learning_rate", "3e-3",
            "--max_seq_length", "32", "--per_device_train_batch_size", "6")  # fmt: skip
"""Options of a short training of a tiny model."""


class Agent:
    """Runs scripts in a folder of its own."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.program = programs / "whet"
        self._environment = os.environ | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}

    def put_first(self, programs: Path) -> None:
        """Have the programs of this folder found before all others."""
        self._environment["PATH"] = os.pathsep.join([str(programs), self._environment["PATH"]])

    def start(self, script: str, *words: Any) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, words)]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=_LONGEST_S,
            check=False,
        )  # fmt: skip

    def run(self, script: str, *words: Any) -> dict[str, Any]:
        """Return the object of a script that succeeds."""
        done = self.start(script, *words)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        (line,) = done.stdout.splitlines()
        return json.loads(line)


@contextmanager
def warm_programs(folder: Path) -> Iterator[Path]:
    """Yield the folder of a `whet` that begins at once."""
    made = Warm(folder, {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])})
    try:
        yield made.bin
    finally:
        made.close()
