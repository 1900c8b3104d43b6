"""`whet launch --hosts` over real ssh between network namespaces: places of ranks, their end, their logs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from host_runs import ALL_REDUCE, STUBBORN, ended, hosts, nothing_left, script, started

from namespaces import Cluster, missing

__all__ = ["hosts", "nothing_left"]  # fixtures

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def test_ranks_of_two_hosts_compute_together(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, ALL_REDUCE)
    code, out, err = ended(hosts.over_ssh("h1,h2", "--nproc_per_node", "1", folder=tmp_path), 120)
    assert code == 0, err
    assert out == "total 3.0\n"
    assert "total 3.0" in (tmp_path / "launch-logs" / "rank-1.log").read_text()
    assert "h2: 1 socket" in err
    assert "rank 1: " in err
    assert "h2:   10.77.0.2 on ve2" in err
    assert "2 ranks on 2 hosts" in err


def test_the_users_own_login_does_not_decide_where_ranks_meet(hosts: Cluster, tmp_path: Path) -> None:
    """They log in to the first host from another network than that of the hosts."""
    script(tmp_path, ALL_REDUCE)
    login = "192.0.2.7 50022 192.0.2.1 22"
    options = ("--nproc_per_node", "1", "--dry_run")
    code, _, err = ended(hosts.over_ssh("h1,h2", *options, folder=tmp_path, SSH_CONNECTION=login))
    assert code == 0, err
    assert "2 ranks on 2 hosts, master 10.77.0.1 port" in err


def test_a_rank_that_fails_stops_all_hosts_within_five_seconds(hosts: Cluster, tmp_path: Path) -> None:
    """Even a rank that ignores SIGTERM; the end of the failed rank's output is shown."""
    script(tmp_path, f"""
if rank == 1:
    time.sleep(1)
    print("the disk is on fire")
    open("failed", "w").write(str(time.time()))
    sys.exit(3)
{STUBBORN}
""")  # fmt: skip
    code, _, err = ended(hosts.over_ssh("h1,h2", "--nproc_per_node", "1", folder=tmp_path))
    took_s = time.time() - float((tmp_path / "failed").read_text())
    assert code == 3
    assert took_s < 6  # the ranks are gone after 4 s; the rest is the launcher's own end on a busy machine
    assert "rank 1 on h2 ended with exit code 3; all ranks on all hosts were stopped" in err
    assert "  | the disk is on fire" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_of_all_hosts(number: signal.Signals, hosts: Cluster, tmp_path: Path) -> None:
    """They have the time to save."""
    script(tmp_path, """
def save(number, frame):
    time.sleep(5)
    open(f"saved-{rank}", "w").write(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
open(f"pid-{rank}-ready", "w").close()
time.sleep(600)
""")  # fmt: skip
    process = hosts.over_ssh("h1,h2", "--nproc_per_node", "1", folder=tmp_path)
    started(tmp_path, 4)
    process.send_signal(number)
    assert ended(process)[0] == 75
    assert [(tmp_path / f"saved-{n}").read_text() for n in range(2)] == [str(int(number))] * 2


def test_restarts_begin_again_on_all_hosts(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, """
tries = f"tries-{rank}"
n = int(open(tries).read()) if os.path.exists(tries) else 0
open(tries, "w").write(str(n + 1))
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(n)
if rank == 1 and n < 2:
    sys.exit(9)
time.sleep(1 if n == 2 else 60)
""")  # fmt: skip
    code, _, err = ended(hosts.over_ssh("h1,h2", "--nproc_per_node", "1", "--max_restarts", "3", folder=tmp_path))
    assert code == 0, err
    assert [(tmp_path / f"tries-{n}").read_text() for n in range(2)] == ["3", "3"]
    assert "restart 2 of 3, on all hosts" in err
