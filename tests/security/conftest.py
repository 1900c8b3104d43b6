"""A run under watch in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QA_TESTS = Path(__file__).resolve().parents[1] / "qa"

Watch = Callable[..., dict[str, Any]]


@pytest.fixture
def watched(tmp_path: Path) -> Watch:
    """Run a job of `referee.py` in a new process; return what it and its audit hook report."""

    def run(job: str, *words: Any, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
        report = tmp_path / f"{job}.json"
        own = {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": f"{QA_TESTS}:{os.environ.get('PYTHONPATH', '')}",
        }
        done = subprocess.run(
            [*prefix, sys.executable, str(Path(__file__).with_name("referee.py")), str(report), job, *map(str, words)],
            capture_output=True, text=True, check=False, cwd=tmp_path, timeout=240, env=os.environ | own | (env or {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(report.read_text("utf-8")) | {"stdout": done.stdout, "stderr": done.stderr}

    return run
