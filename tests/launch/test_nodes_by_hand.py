"""One launcher started by hand on each node, without ssh: they find each other, and end together."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from host_runs import ALL_REDUCE, SLEEP, STUBBORN, ended, hosts, nothing_left, script, started

from namespaces import Cluster, missing

__all__ = ["hosts", "nothing_left"]  # fixtures

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def node(hosts: Cluster, number: int, folder: Path, *options: str, **more: object) -> subprocess.Popen[str]:
    """Start the launcher of a node; the first is h1."""
    usual = ("--nnodes", "2", "--node_rank", str(number), "--master_addr", "10.77.0.1", "--nproc_per_node", "1")
    return hosts.launched(*usual, *options, folder=folder, at=f"h{number % 2 + 1}", **more)  # type: ignore[arg-type]


def test_nodes_find_each_other_in_any_order(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['GROUP_RANK'], os.environ['GLOO_SOCKET_IFNAME'])\n" + ALL_REDUCE)
    second = node(hosts, 1, tmp_path, "--nproc_per_node", "2")
    time.sleep(2)
    first = node(hosts, 0, tmp_path)
    code, out, err = ended(first, 120)
    assert (code, out) == (0, "0 ve1\ntotal 6.0\n"), err
    assert "3 ranks on 2 hosts" in err
    code, out, err = ended(second, 10)
    assert (code, out) == (0, "")
    assert "waiting for node 0 at 10.77.0.1 port 29500" in err
    log = (tmp_path / "launch-logs" / "rank-2.log").read_text().splitlines()
    assert [line for line in log if not line.startswith("[W")] == ["1 ve2", "total 6.0"]  # torch warns about host names


def test_a_rank_that_fails_stops_all_nodes(hosts: Cluster, tmp_path: Path) -> None:
    """All launchers end with its exit code, and say which rank it was."""
    script(tmp_path, f"if rank == 1:\n    sys.exit(3)\n{STUBBORN}")
    first, second = node(hosts, 0, tmp_path), node(hosts, 1, tmp_path)
    began = time.monotonic()
    (code, _, err), (other, _, said) = ended(first), ended(second)
    assert (code, other) == (3, 3)
    assert time.monotonic() - began < 15
    assert "rank 1 on node 1 (h2) ended with exit code 3" in err
    assert "rank 1 on node 1 (h2) ended with exit code 3" in said


@pytest.mark.parametrize("killed", [0, 1])
def test_no_rank_outlives_any_launcher(killed: int, hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    nodes = [node(hosts, number, tmp_path) for number in range(2)]
    started(tmp_path, 2)
    nodes[killed].kill()
    assert hosts.empty(8) == ""
    for process in nodes:
        process.communicate()
    assert nodes[1 - killed].returncode == 74


def test_a_signal_to_all_launchers_counts_once(hosts: Cluster, tmp_path: Path) -> None:
    """A scheduler that ends a job signals every node: ranks still have the time to save."""
    script(tmp_path, """
def save(number, frame):
    time.sleep(2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"pid-{rank}-ready", "w").close()
time.sleep(600)
""")  # fmt: skip
    nodes = [node(hosts, number, tmp_path) for number in range(2)]
    started(tmp_path, 4)
    for process in reversed(nodes):
        process.send_signal(signal.SIGTERM)
    assert [ended(process)[0] for process in nodes] == [75, 75]


def test_restarts_start_all_nodes_again(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, """
tries = f"tries-{rank}"
n = int(open(tries).read()) if os.path.exists(tries) else 0
open(tries, "w").write(str(n + 1))
if rank == 1 and n < 2:
    sys.exit(9)
time.sleep(1 if n == 2 else 60)
""")  # fmt: skip
    nodes = [node(hosts, number, tmp_path, "--max_restarts", "2") for number in range(2)]
    assert [ended(process)[0] for process in nodes] == [0, 0]
    assert [(tmp_path / f"tries-{n}").read_text() for n in range(2)] == ["3", "3"]


def test_nodes_that_do_not_belong_together_are_refused(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    first, second = node(hosts, 0, tmp_path), node(hosts, 1, tmp_path, command=("train.py", "--lr", "1"))
    (code, _, err), (other, _, said) = ended(first), ended(second)
    assert (code, other) == (78, 78)
    assert "node 1 (h2): another command than on node 0 (h1)" in err
    assert "another command" in said


def test_a_number_that_is_taken_or_too_high_is_refused(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    (tmp_path / "other").mkdir()
    script(tmp_path / "other", SLEEP)
    first = node(hosts, 0, tmp_path, "--nnodes", "3", "--join_timeout_s", "8")
    second = node(hosts, 1, tmp_path, "--nnodes", "3")
    time.sleep(3)
    code, _, err = ended(node(hosts, 1, tmp_path / "other", "--nnodes", "3"))
    assert code == 78
    assert "node 1 (h2) has joined already" in err
    code, _, err = ended(node(hosts, 1, tmp_path / "other", "--nnodes", "2"))
    assert code == 78
    assert "node 0 was started with --nnodes 3, this one with --nnodes 2" in err
    (code, _, err), (other, _, _) = ended(first), ended(second)
    assert (code, other) == (78, 78)
    assert "node 2 did not join" in err


def test_a_node_0_that_never_answers_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    code, _, err = ended(node(hosts, 1, tmp_path, "--join_timeout_s", "2"), 20)
    assert code == 78
    assert "node 0 does not answer" in err
    assert "10.77.0.1: Connection refused" in err
