"""A promise that a machine cannot show is named at the end of the tests, and fails where nothing may be skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from not_shown import needs_free_memory

ROOT = Path(__file__).resolve().parents[2]
_TEST = "tests/security/test_network.py::test_a_run_works_without_any_network"


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize(("gate", "code"), [("0", 0), ("1", 1)])
def test_a_missing_tool_is_named(tmp_path: Path, gate: str, code: int) -> None:
    """Where no program can be found, there is no unshare either."""
    environment = os.environ | {"PATH": str(tmp_path), "WHET_GATE": gate}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", _TEST]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-3000:]
    named = "S7 not shown here: unshare -rn makes no network name space; needs unshare (util-linux)"
    if gate == "0":
        assert "promises of the docs that could not be shown on this machine" in done.stdout
        assert any(line.startswith(named) and line.endswith("(1 tests)") for line in done.stdout.splitlines())
    else:
        assert named in done.stdout
        assert "WHET_GATE=1" in done.stdout


def test_needs_free_memory_skips_and_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small machine skips such a test instead of failing it."""
    monkeypatch.delenv("WHET_GATE", raising=False)
    needs_free_memory("R22", 1.0)
    with pytest.raises(
        pytest.skip.Exception, match=r"R22 not shown here: .* GB of memory are free; needs 1,000,000 GB"
    ):
        needs_free_memory("R22", 1e15)
