"""What the tests of several hosts share: scripts that ranks run, and how runs end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Cluster, cluster

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
rank = int(os.environ["RANK"])
open(f"pid-{rank}", "w").write(str(os.getpid()))
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""
SLEEP = "time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts for all tests of a module."""
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(hosts: Cluster) -> Iterator[None]:
    """No process is left on a host after a test."""
    yield
    assert hosts.empty(2) == ""


def script(folder: Path, text: str) -> None:
    """Write the script that the ranks run."""
    (folder / "train.py").write_text(PRELUDE + text, "utf-8")


def ended(process: subprocess.Popen[str], within_s: float = 60) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


def started(folder: Path, n_ranks: int, within_s: float = 30) -> None:
    """Wait until so many ranks run."""
    until = time.monotonic() + within_s
    while len(list(folder.glob("pid-*"))) < n_ranks:
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.05)
