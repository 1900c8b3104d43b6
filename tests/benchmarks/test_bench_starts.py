"""Each benchmark that people start can be started: `--help` imports all of it, from any folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS).as_posix()
    for path in BENCHMARKS.rglob("*.py")
    if "ArgumentParser(" in (text := path.read_text("utf-8")) and "__main__" in text
    if not path.stem.endswith("worker")  # started by another one
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_says_how_it_is_started(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", done.stderr)
    if missing and not [*BENCHMARKS.rglob(f"{missing[1]}.py")]:
        pytest.skip(f"{script} runs where {missing[1]} is installed")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
