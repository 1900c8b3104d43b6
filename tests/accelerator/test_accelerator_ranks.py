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


def printed(script: Path, *words: str) -> list[str]:
    """Return the lines that two ranks of a script print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


def on_two_ranks(kind: str, folder: Path) -> dict[str, Any]:
    """Return what the first of two ranks prints."""
    return json.loads(printed(LOOP, kind, str(folder))[-1])


@pytest.mark.reliability
def test_two_ranks_have_the_losses_of_accelerate_and_resume_bitwise(tmp_path: Path) -> None:
    theirs = on_two_ranks("accelerate", tmp_path / "none")
    ours = on_two_ranks("whet", tmp_path / "state")
    assert ours["ranks"] == 2
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=CLOSE)
    assert ours["labels"] == theirs["labels"] == 38  # rows that fill the last batch are gathered once
    resumed = on_two_ranks("whet", tmp_path / "state")
    assert resumed["losses"] == ours["losses"][len(ours["losses"]) // 2 :]


@pytest.mark.reliability
def test_streams_and_gathered_texts_travel_without_pickles() -> None:
    """Rank 0 reads a stream for all; what two ranks read and gather is what they do with accelerate's own."""
    theirs = json.loads(printed(LOOP, "exchanges", "accelerate")[-1])
    ours, refused = map(json.loads, printed(LOOP, "exchanges", "whet")[-2:])
    assert sorted(ours["labels"]) == [*range(38)]
    assert ours == theirs
    assert refused.startswith("ConfigError: a value of rank 0 cannot travel to the other ranks")


@pytest.mark.reliability
def test_ranks_fail_together_if_one_cannot_save_or_load_its_state(tmp_path: Path) -> None:
    """None waits for the others; the error of a user's object is that of its rank, and the others name it."""
    lines = printed(LOOP.with_name("failing_states.py"), str(tmp_path / "state"))
    said = {rank: [line.partition(": ")[2] for line in lines if line.startswith(f"rank {rank} ")] for rank in "01"}
    for ends in said.values():
        assert [one == "done" for one in ends] == [False, True, False, True]
    for failed, other, number in (("0", "1", 0), ("1", "0", 2)):
        assert said[failed][number] == "LookupError: no state today"
        assert said[other][number].startswith("StorageError: the state in")
        assert f"got: rank {failed}: LookupError: no state today" in said[other][number]
