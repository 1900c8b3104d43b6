"""Two replica groups of torchft train an optimized model as one does, also when one is killed and rejoins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
_N_WITH_A_DEATH = 14
"""Common steps, some of one group alone, and common ones again."""


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


def _start(number: int, lighthouse: str, n_steps: int, *role: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([*sys.path, str(_HERE.parent / "ranks")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, str(_HERE / "torchft_job.py"), str(number), lighthouse, str(n_steps), *role]
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _lines(group: subprocess.Popen[str], code: int = 0) -> list[dict[str, Any]]:
    try:
        out, _ = group.communicate(timeout=400)
    finally:
        group.kill()
    assert group.returncode == code
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


def test_killed_group_rejoins_and_the_curve_stays_that_of_one(tmp_path: Path) -> None:
    """The one that is left heals the new one: step, weights and the optimizer's state."""
    with _lighthouse(1) as address:
        alone = _lines(_start(0, address, _N_WITH_A_DEATH))
    with _lighthouse(1) as address, ExitStack() as started:

        def start(number: int, role: str) -> subprocess.Popen[str]:
            group = _start(number, address, _N_WITH_A_DEATH, role, str(tmp_path))
            started.callback(group.kill)
            return group

        stays, dies = start(0, "stays"), start(1, "dies")
        killed = _lines(dies, code=9)
        healed = _lines(start(1, "rejoins"))
        left = _lines(stays)
    groups = [line["groups"] for line in left[:-1]]
    assert [line["step"] for line in left[:-1]] == [*range(_N_WITH_A_DEATH)]
    assert 1 in groups
    assert groups[1 - len(healed) :] == [2] * (len(healed) - 1)
    assert healed[0]["step"] > killed[-1]["step"]
    others = {line["step"]: line["loss"] for line in [*killed, *healed[:-1]] if line["groups"] == 2}
    for line, of_one in zip(left[:-1], alone[:-1], strict=True):
        loss = line["loss"] if line["groups"] == 1 else (line["loss"] + others[line["step"]]) / 2
        assert loss == pytest.approx(of_one["loss"], rel=_CURVE)
    assert left[-1]["digest"] == healed[-1]["digest"]
