"""The planted faults of the reliability tests can still be planted: what each replaces is in the package, once."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _planted() -> tuple[Any, ...]:
    """Return the faults, from their file: another one of the tests has its name."""
    name = "planted_faults"
    sys.modules[name] = ModuleType(name)  # a dataclass looks for the module that it is of
    return runpy.run_path(str(ROOT / "tests" / "reliability" / "planted" / "faults.py"), run_name=name)["PLANTED"]


PLANTED = _planted()


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(tmp_path: Path, fault: Any) -> None:
    for edit in fault.edits:
        path = tmp_path / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            shutil.copy(ROOT / "src" / "whet" / edit.file, path)
        edit.apply(tmp_path)


@pytest.mark.slow
def test_its_tests_are_there() -> None:
    """By file, function and case: pytest finds each of them."""
    names = dict.fromkeys(f"tests/{test}" for fault in PLANTED for test in fault.tests)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *names]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]


def test_each_has_a_name_of_its_own_and_none_is_lost() -> None:
    names = [fault.name for fault in PLANTED]
    assert len(set(names)) == len(names) >= 20
