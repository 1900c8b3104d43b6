"""Everything that is wrong with given settings comes in one error: wrong types, unknown names and broken rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
import whet

_WRONG: dict[str, Any] = {"bf16": "maybe", "lerning_rate": 3e-5, "learning_rate": -1.0, "warmup_steps": 1.5}
_WHATS = ("does not fit", "lerning_rate", "learning_rate is below 0", "warmup_steps is neither steps nor a share")


def test_python_arguments_report_all_problems_at_once() -> None:
    with pytest.raises(whet.WhetError) as caught:
        engine.TrainingArguments("out", **_WRONG)
    assert [any(what in problem.what for problem in caught.value.problems) for what in _WHATS] == [True] * 4


@pytest.mark.parametrize("by", ["flags", "file"])
def test_command_line_reports_all_problems_at_once(by: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("".join(f"{name}: {value}\n" for name, value in _WRONG.items()))
    flags = [f"--{name}={value}" for name, value in _WRONG.items()]
    words = [str(config)] if by == "file" else flags
    command = [sys.executable, "-m", "whet", "qa", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 78
    missing = [what for what in (*_WHATS, "no model is named", "no data is named") if what not in done.stderr]
    assert not missing, done.stderr
