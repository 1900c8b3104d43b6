"""One launcher started by hand on each node, without ssh: they find each other, and their ranks."""

from __future__ import annotations

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
    time.sleep(15)  # so that it waits, on a busy machine as well
    first = node(hosts, 0, tmp_path)
    code, out, err = ended(first, 120)
    assert (code, out) == (0, "0 ve1\ntotal 6.0\n"), err
    code, out, err = ended(second, 10)
    assert (code, out) == (0, ""), err
    assert "waiting for node 0 at 10.77.0.1 port 29500" in err
    log = (tmp_path / "launch-logs" / "rank-2.log").read_text().splitlines()
    assert [line for line in log if not line.startswith("[W")] == ["1 ve2", "total 6.0"]  # torch warns about host names


@pytest.mark.parametrize("killed", [0, 1])
def test_no_rank_outlives_its_launcher(killed: int, hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    nodes = [node(hosts, number, tmp_path) for number in range(2)]
    started(tmp_path, 2)
    for process in (nodes[killed], nodes[1 - killed]):
        process.kill()
    assert hosts.empty(8) == ""
    for process in nodes:
        process.communicate()


def test_restarts_start_all_nodes_again(hosts: Cluster, tmp_path: Path) -> None:
    """Ranks that are started again do not meet the addresses of those that failed."""
    script(tmp_path, """
import torch, torch.distributed as dist
n = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
dist.barrier()
if rank == 1 and n < 2:
    os._exit(9)
total = torch.ones(1)
dist.all_reduce(total)
print("total", total.item(), "in attempt", n)
dist.destroy_process_group()
""")  # fmt: skip
    nodes = [node(hosts, number, tmp_path, "--max_restarts", "2") for number in range(2)]
    (code, out, err), (other, _, said) = ended(nodes[0], 120), ended(nodes[1])
    assert (code, other) == (0, 0), err + said
    assert out == "total 2.0 in attempt 2\n"


def test_a_node_0_that_never_answers_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    code, _, err = ended(node(hosts, 1, tmp_path, "--join_timeout_s", "2"), 20)
    assert code == 78
    assert "node 0 does not answer" in err
    assert "Connection refused" in err
