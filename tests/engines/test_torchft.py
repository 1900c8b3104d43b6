"""Two replica groups of torchft train an optimized model as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft: make test-engines installs it")
from engine_runs import free_port, wait_for

pytestmark = pytest.mark.reliability
_CURVE = 1e-5
"""Gradients of two ranks are added in another order than within one process."""
_HERE = Path(__file__).parent
_N_STEPS = 6


@contextmanager
def _lighthouse(min_groups: int) -> Iterator[str]:
    """Start the server through which groups find each other; return its address."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", str(min_groups)]
    server = subprocess.Popen([*command, "--join_timeout_ms", "1000", "--bind", f"127.0.0.1:{port}"])
    try:
        wait_for(f"http://127.0.0.1:{port}/", 30)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(10)


def _start(number: int, lighthouse: str, n_steps: int) -> subprocess.Popen[str]:
    path = os.pathsep.join([*sys.path, str(_HERE.parent / "ranks")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, str(_HERE / "torchft_job.py"), str(number), lighthouse, str(n_steps)]
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _lines(group: subprocess.Popen[str]) -> list[dict[str, Any]]:
    try:
        out, _ = group.communicate(timeout=180)
    finally:
        group.kill()
    assert group.returncode == 0
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_two_groups_train_the_curve_of_one() -> None:
    with _lighthouse(1) as address:
        alone = _lines(_start(0, address, _N_STEPS))
    with _lighthouse(2) as address:
        two = [_lines(group) for group in [_start(number, address, _N_STEPS) for number in (0, 1)]]
    assert [[line["groups"] for line in group[:-1]] for group in two] == [[2] * _N_STEPS] * 2
    for n in range(_N_STEPS):
        assert (two[0][n]["loss"] + two[1][n]["loss"]) / 2 == pytest.approx(alone[n]["loss"], rel=_CURVE)
    assert two[0][-1]["digest"] == two[1][-1]["digest"]
