"""`whet.Accelerator` on two ranks: the losses of accelerate's own loop, and a state that all ranks resume from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOP = Path(__file__).with_name("own_loops.py")
CLOSE = 1e-5
"""Relative: float32 rounding."""


def on_two_ranks(kind: str, folder: Path) -> dict[str, Any]:
    """Return what the first of two ranks prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LOOP)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, kind, str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.reliability
def test_two_ranks_have_the_losses_of_accelerate_and_resume_bitwise(tmp_path: Path) -> None:
    theirs = on_two_ranks("accelerate", tmp_path / "none")
    ours = on_two_ranks("whet", tmp_path / "state")
    assert ours["ranks"] == 2
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=CLOSE)
    assert ours["labels"] == theirs["labels"] == 38  # rows that fill the last batch are gathered once
    resumed = on_two_ranks("whet", tmp_path / "state")
    assert resumed["losses"] == ours["losses"][len(ours["losses"]) // 2 :]
