"""R8 on several hosts: whatever dies, stops or is cut, no rank is left on any host, and the launcher says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Cluster, cluster, missing
from not_shown import not_shown
from whet.launch.rank import STOP_S

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))
from host_runs import STUBBORN, ended, script, started

pytestmark = pytest.mark.reliability

HEARTBEAT_S = 4
_OPTIONS = ("--nproc_per_node", "1", "--heartbeat_timeout_s", str(HEARTBEAT_S))
STOPPED_S = HEARTBEAT_S + 6
"""Ranks get SIGKILL 4 s after the limit; the rest is for a busy machine."""
EMPTY_S = STOP_S + 6
"""An agent without a launcher ends itself 2 s after its ranks' SIGKILL; the rest is for a busy machine."""


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := missing():
        not_shown("R8", why, "root, network namespaces and openssh-server")
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def running(hosts: Cluster, tmp_path: Path) -> subprocess.Popen[str]:
    """The launcher on h1 of two ranks that ignore SIGTERM, and have children."""
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    script(tmp_path, child + STUBBORN)
    process = hosts.over_ssh("h1,h2", *_OPTIONS, folder=tmp_path)
    started(tmp_path, 2)
    return process


def find(hosts: Cluster, host: str, words: str) -> int:
    """Return the process of a host whose command line has these words."""
    return next(pid for pid, line in hosts.pids(host).items() if words in line and "whet launch" not in line)


def test_no_process_is_left_after_kill_9_of_the_launcher(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    running.kill()
    assert hosts.empty(EMPTY_S) == ""
    running.communicate()


def test_a_cut_link_ends_the_ranks_on_both_sides(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    hosts.cut("h2")
    code, _, err = ended(running, STOPPED_S)
    assert code == 74
    assert "h2 is lost: its connection ended" in err
    until = time.monotonic() + STOPPED_S
    while time.monotonic() < until and any("train.py" in line for line in hosts.pids("h2").values()):
        time.sleep(0.05)
    assert not any("train.py" in line or "sleep(600)" in line for line in hosts.pids("h2").values())


def test_the_end_of_ssh_ends_the_ranks(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    os.kill(find(hosts, "h1", "ssh -F"), signal.SIGKILL)
    code, _, err = ended(running, 10)
    assert code == 74
    assert "h2 is lost: its connection ended" in err
    assert hosts.empty(EMPTY_S) == ""


def test_the_end_of_an_agent_ends_its_ranks_and_all_others(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    agent = next(pid for pid, line in hosts.pids("h2").items() if line.split()[-2:] == ["-m", "whet.launch"])
    os.kill(agent, signal.SIGKILL)
    code, _, err = ended(running, 10)
    assert code == 74
    assert "h2 is lost" in err
    assert hosts.empty(EMPTY_S) == ""


def test_a_host_that_stands_still_is_lost(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    """All its processes are stopped; when they continue, they end."""
    frozen = list(hosts.pids("h2"))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    code, _, err = ended(running, STOPPED_S)
    assert code == 74
    assert "h2 is lost: its connection ended" in err
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    assert hosts.empty(8) == ""


def test_a_launcher_that_is_stopped_too_long_loses_its_ranks(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    lines = [line for host in hosts.names for line in hosts.pids(host).values() if "whet launch" not in line]
    assert not any("train.py" in line for line in lines)
    running.send_signal(signal.SIGCONT)
    code, _, _ = ended(running, 10)
    assert code != 0
    assert hosts.empty(EMPTY_S) == ""


def test_a_launcher_that_is_stopped_for_a_moment_loses_nothing(hosts: Cluster, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGSTOP)
    time.sleep(HEARTBEAT_S / 2)
    running.send_signal(signal.SIGCONT)
    time.sleep(HEARTBEAT_S)
    assert running.poll() is None
    assert sum("train.py" in line for line in hosts.pids("h2").values()) >= 1
    for _ in range(2):
        running.send_signal(signal.SIGTERM)
        time.sleep(1.2)  # signals within a second are one request
    assert ended(running, 10)[0] == 128 + signal.SIGKILL
    assert hosts.empty(EMPTY_S) == ""


def test_a_killed_rank_is_restarted_with_all_others(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, """
tries = f"tries-{rank}"
n = int(open(tries).read()) if os.path.exists(tries) else 0
open(tries, "w").write(str(n + 1))
time.sleep(0 if n else 600)
""")  # fmt: skip
    process = hosts.over_ssh("h1,h2", *_OPTIONS, "--max_restarts", "1", folder=tmp_path)
    started(tmp_path, 2)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 0, err
    assert "rank 1 on h2 was killed by signal 9" in err
    assert [(tmp_path / f"tries-{n}").read_text() for n in range(2)] == ["2", "2"]
