"""`whet launch --hosts` over real ssh between network namespaces: places of ranks, their end, their logs."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from host_runs import ALL_REDUCE, SLEEP, STUBBORN, ended, hosts, nothing_left, script, started

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


def test_ranks_are_dealt_by_host_as_torchrun_does(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, """
found = {**os.environ, "host": socket.gethostname(), "cpus": sorted(os.sched_getaffinity(0))}
json.dump(found, open(f"rank-{rank}.json", "w"))
""")  # fmt: skip
    (tmp_path / "hosts").write_text("h1 slots=2\nh2:1\n")
    ssh = ("--ssh_command", f"ssh -F {hosts.ssh_config}", "--master_port", "23456")
    variables = {"WHET_SOMETHING": "1", "SECRET_THING": "2"}
    process = hosts.launched("--hostfile", "hosts", *ssh, "--env", "COLOUR=a b", folder=tmp_path, **variables)
    code, _, err = ended(process)
    assert code == 0, err
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"rank-{n}.json").read_text()) for n in range(3)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "host")
    assert [tuple(one[name] for name in names) for one in ranks] == [
        ("0", "3", "0", "2", "0", "10.77.0.1", "23456", "h1"),
        ("1", "3", "1", "2", "0", "10.77.0.1", "23456", "h1"),
        ("2", "3", "0", "1", "1", "10.77.0.1", "23456", "h2"),
    ]
    assert [one["GLOO_SOCKET_IFNAME"] for one in ranks] == ["ve1", "ve1", "ve2"]
    assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
    assert [one["OMP_NUM_THREADS"] for one in ranks] == ["1", "1", "2"]
    assert all(one["COLOUR"] == "a b" and one["WHET_SOMETHING"] == "1" for one in ranks)
    assert "SECRET_THING" not in ranks[2]


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


def test_the_first_failure_counts_not_what_follows_from_it(hosts: Cluster, tmp_path: Path) -> None:
    """A peer of a rank that dies fails too, in torch's connection to it."""
    script(tmp_path, """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if rank == 1:
    os._exit(9)
dist.all_reduce(torch.ones(1))
""")  # fmt: skip
    code, _, err = ended(hosts.over_ssh("h1,h2", "--nproc_per_node", "1", folder=tmp_path), 120)
    assert code == 9, err
    assert "rank 1 on h2 ended with exit code 9" in err


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


def test_a_second_signal_ends_ranks_that_do_not(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    process = hosts.over_ssh("h1,h2", "--nproc_per_node", "1", folder=tmp_path)
    started(tmp_path, 2)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process, 10)[0] == 128 + signal.SIGKILL


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


def test_a_dry_run_shows_every_command_and_starts_nothing(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    process = hosts.over_ssh("h1:2,h2", "--dry_run", "--env", "HF_TOKEN", folder=tmp_path, HF_TOKEN="hf_secret")
    code, out, err = ended(process)
    assert (code, out) == (0, ""), err
    assert not list(tmp_path.glob("pid-*"))
    assert "ssh -F" in err
    assert "rank 2: 2 threads" in err
    assert "10.77.0.2 on ve2" in err
    assert "# node 1: train.py" in " ".join(err.split())
    assert "hf_secret" not in err


def test_output_of_rank_0_arrives_unchanged(hosts: Cluster, tmp_path: Path) -> None:
    """Bytes that are no text, long lines, both streams, to the last byte."""
    script(tmp_path, """
if rank == 0:
    data = bytes(range(256)) * 4000
    sys.stdout.buffer.write(data + b"end")
    sys.stderr.write("a warning")
""")  # fmt: skip
    with hosts.over_ssh("h2,h1", "--nproc_per_node", "1", folder=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.buffer.read() == bytes(range(256)) * 4000 + b"end"  # type: ignore[attr-defined]
        assert "a warning" in process.stderr.read()
    assert process.returncode == 0


def test_one_host_over_ssh_needs_no_network(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['WORLD_SIZE'])")
    code, out, err = ended(hosts.over_ssh("h2:2", folder=tmp_path))
    assert (code, out) == (0, "127.0.0.1 lo 2\n"), err


def test_rank_0_is_heard_while_it_runs(hosts: Cluster, tmp_path: Path) -> None:
    """Its output is not held back until it ends, though it goes through a pipe."""
    script(tmp_path, "print('step 1')\nopen(f'pid-{rank}-done', 'w').close()\ntime.sleep(600)")
    process = hosts.over_ssh("h2,h1", "--nproc_per_node", "1", folder=tmp_path)
    assert process.stdout is not None
    began = time.monotonic()
    assert process.stdout.readline() == "step 1\n"
    assert time.monotonic() - began < 30
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=20)


def test_a_missing_ssh_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    code, _, err = ended(hosts.launched("--hosts", "h2", "--ssh_command", "no-such-ssh", folder=tmp_path))
    assert code == 78
    assert "h2: no-such-ssh cannot be started on this machine" in err


def test_a_reader_that_pauses_costs_neither_output_nor_hosts(hosts: Cluster, tmp_path: Path) -> None:
    """More than all buffers hold waits for the reader, while signs of life still come through."""
    script(tmp_path, "if rank == 0:\n    for _ in range(20000):\n        print('x' * 1000)\nelse:\n    time.sleep(1)\n")
    process = hosts.over_ssh("h2,h1", "--nproc_per_node", "1", "--heartbeat_timeout_s", "4", folder=tmp_path)
    time.sleep(9)
    assert process.poll() is None
    code, out, err = ended(process)
    assert (code, len(out)) == (0, 20000 * 1001), err
