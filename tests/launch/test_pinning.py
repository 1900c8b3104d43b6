"""Ranks that mpirun bound to one core get their share of the machine, unless that is what was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)

_FIRST = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
_SCRIPT = """
import json, os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from whet.config.ranks import here
from whet.launch.pinning import widened
said = widened(here(), os.environ)
found = {"said": said, "cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS")}
print(json.dumps(found))
"""


def bound_to_one(n_local: int = 1, **variables: str) -> dict[str, Any]:
    """Return what a rank of Open MPI ends up with that was bound to one core; another host has as many ranks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "SLURM_"))}
    place = {"RANK": "0", "SIZE": str(2 * n_local), "LOCAL_RANK": "0", "LOCAL_SIZE": str(n_local)}
    open_mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    words = [sys.executable, "-c", _SCRIPT, str(_FIRST)]
    done = subprocess.run(words, env=kept | open_mpi | variables, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_rank_bound_to_one_core_gets_its_share() -> None:
    found = bound_to_one()
    assert len(found["cpus"]) > 1
    assert int(found["threads"]) == len(found["cpus"])
    assert "Open MPI has bound rank 0 to 1 core; it now runs on CPUs" in found["said"]


def test_rank_with_more_threads_than_cores_gets_its_share() -> None:
    found = bound_to_one(OMP_NUM_THREADS="2")
    assert len(found["cpus"]) > 1
    assert found["threads"] == "2"


def test_rank_that_asks_for_one_thread_stays_where_it_is() -> None:
    assert bound_to_one(OMP_NUM_THREADS="1") == {"said": None, "cpus": [_FIRST], "threads": "1"}


def test_rank_of_a_scheduler_is_warned_and_stays_on_its_cores() -> None:
    """Other cores of the machine may belong to somebody else."""
    found = bound_to_one(OMP_NUM_THREADS="2", SLURM_JOB_ID="1")
    assert found["cpus"] == [_FIRST]
    assert "2 threads on 1 core, which take time from each other" in found["said"]


def test_more_threads_than_there_are_cores_are_reported() -> None:
    found = bound_to_one(OMP_NUM_THREADS="4096")
    assert found["cpus"] == [_FIRST]
    assert "4096 threads on 1 core" in found["said"]
