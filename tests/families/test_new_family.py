"""An engineer adds a family as one file: the example of docs/families.md passes the whole matrix."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "families.md"


@pytest.mark.night
@pytest.mark.slow
def test_new_family_needs_one_file(tmp_path: Path) -> None:
    """It runs packed and fused with every head, after nothing but this file came into the folder of families."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "nord.py").write_text(example, "utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "nord_model",
        "-k",
        "nord",
        str(HERE),
    ]
    environment = os.environ | {"PYTHONPATH": str(HERE), "NORD_FAMILY": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 30, done.stdout[
        -1000:
    ]  # it shares the forwards of BERT, which plain torch runs in its own cases
