"""What a command does before it works: nothing that costs seconds or other programs their time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.true_start

_PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "2000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_idle_threads_sleep_unless_a_user_decides_otherwise(given: dict[str, str], wanted: str) -> None:
    code = "import atexit, os; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
    code += "from whet.cli.main import main; main(['--version'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_PLAIN | given)
    assert found.stdout.splitlines()[-1] == wanted


@pytest.mark.parametrize("task", ["qa", *(pytest.param(task, marks=pytest.mark.night) for task in ("classify", "tag"))])
def test_library_of_data_sets_is_not_imported_for_files(task: str) -> None:
    code = f"import sys, whet.tasks.{task}.job; print(sorted({{'datasets', 'pyarrow.dataset'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
