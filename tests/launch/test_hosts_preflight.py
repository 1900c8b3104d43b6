"""The pre-flight of `whet launch --hosts` with real faults: each host and its fix are named, all at once, and soon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import ALL_REDUCE, SLEEP, ended, script

from namespaces import Cluster, cluster, missing

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

MOST_S = 30.0
_HOSTS = "127.0.0.1 localhost\n"
_ONE_EACH = ("--nproc_per_node", "1")


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hosts"), n_hosts=3) as made:
        yield made
        assert made.empty(2) == ""


def refused(process: subprocess.Popen[str]) -> str:
    """Return what a launcher prints that starts nothing; it must not take long."""
    began = time.monotonic()
    code, out, err = ended(process, MOST_S)
    assert (code, out) == (78, ""), err
    assert time.monotonic() - began < MOST_S
    return err


def test_every_fault_of_every_host_is_shown_at_once(hosts: Cluster, tmp_path: Path) -> None:
    """No sshd on one host, another torch on the next, a name that nobody knows."""
    script(tmp_path, SLEEP)
    fake = tmp_path / "fake" / "torch-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    hosts.stop_sshd("h2")
    hosts.start_sshd("h3", f"SetEnv PYTHONPATH={fake.parent}")
    err = refused(hosts.over_ssh("h1,h2,h3,no-such-host", *_ONE_EACH, folder=tmp_path))
    assert "h2 cannot be reached" in err
    assert "Connection refused" in err
    assert "fix: start sshd there" in err
    assert "h3: another version of torch" in err
    assert "got: 1.0; h1 has 2" in err
    assert "no-such-host cannot be reached" in err
    assert "fix: correct the name" in err
    assert not list(tmp_path.glob("pid-*"))


def test_a_host_without_key_or_python_or_folder_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    hosts.start_sshd("h2", "AuthorizedKeysFile none")
    (hosts.folder / "h2" / "sshd_config").read_text()
    python = tmp_path / "python"  # exists on h1 alone, by what h3 is started with
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = h3 ] && exec /none/python "$@"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    err = refused(hosts.over_ssh("h1,h2,h3", "--python", str(python), *_ONE_EACH, folder=tmp_path))
    assert "fix: let the key in once: ssh-copy-id h2" in err
    assert "h3 cannot be reached" in err
    assert "fix: name the Python of the hosts with --python PATH" in err


def test_a_missing_working_folder_and_a_missing_script_are_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    err = refused(hosts.over_ssh("h2,h3", "--working_dir", "/no/folder", *_ONE_EACH, folder=tmp_path))
    assert "h2: the working folder is missing" in err
    assert "h3: the working folder is missing" in err
    err = refused(hosts.over_ssh("h2,h3", "--working_dir", "/", *_ONE_EACH, folder=tmp_path))
    assert "h2: what is to be launched does not exist" in err


def test_too_many_ranks_for_a_host_are_refused(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    err = refused(hosts.over_ssh("h1,h2:4096", *_ONE_EACH, folder=tmp_path))
    assert "h2: 4096 ranks do not fit on this machine" in err


def test_a_firewall_around_the_first_host_is_named(hosts: Cluster, tmp_path: Path) -> None:
    """It shows when the others do not reach the first host's launcher."""
    script(tmp_path, SLEEP)
    hosts.firewall("h1")
    code, _, err = ended(hosts.over_ssh("h1,h3", *_ONE_EACH, folder=tmp_path), 120)
    assert code == 78
    assert "h3: error: node 0 does not answer" in err
    assert "10.77.0.1 port" in err
    assert "open all TCP ports between the nodes" in " ".join(err.replace("h3:", "").split())


def test_a_host_that_answers_nothing_is_reported_in_time(hosts: Cluster, tmp_path: Path) -> None:
    """Its link is cut, so that packets get lost."""
    script(tmp_path, SLEEP)
    hosts.cut("h3")
    err = refused(hosts.over_ssh("h1,h2,h3", *_ONE_EACH, folder=tmp_path))
    assert "h3 cannot be reached" in err
    assert "h2" not in err


def test_a_master_port_in_use_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    code = "import socket, time; s = socket.create_server(('', 23457)); print(1, flush=True); time.sleep(60)"
    blocker = hosts.start("h2", [sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert blocker.stdout is not None
    blocker.stdout.readline()
    err = refused(hosts.over_ssh("h2,h3", "--master_port", "23457", *_ONE_EACH, folder=tmp_path))
    assert "h2: the master port is not free" in err
    assert "port 23457" in err
    blocker.kill()
    with blocker:
        pass


NAMES = {
    "debian's 127.0.1.1": (_HOSTS + "127.0.1.1 h1\n", _HOSTS + "127.0.1.1 h2\n"),
    "own name unknown": (_HOSTS, _HOSTS),
    "own name is another host's": (_HOSTS + "10.77.0.2 h1\n10.77.0.1 h2\n", _HOSTS + "10.77.0.1 h2\n10.77.0.2 h1\n"),
    "own name leads nowhere": (_HOSTS + "10.99.0.1 h1\n", _HOSTS + "10.99.0.2 h2\n"),
    "no hosts file": ("", ""),
}


@pytest.mark.parametrize("names", list(NAMES))
def test_bad_names_of_hosts_are_survived(names: str, hosts: Cluster, tmp_path: Path) -> None:
    """Ranks get addresses that were tried and the interface that leads there; no name is looked up."""
    script(tmp_path, ALL_REDUCE)
    for host, text in zip(("h1", "h2"), NAMES[names], strict=True):
        hosts.set_names(host, text)
        hosts.start_sshd(host)
    code, out, err = ended(hosts.over_ssh("h1,h2", *_ONE_EACH, folder=tmp_path), MOST_S)
    assert (code, out) == (0, "total 3.0\n"), err


def test_a_name_service_that_does_not_answer_is_survived(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, ALL_REDUCE)
    for host in ("h1", "h2"):
        (hosts.folder / host / "resolv.conf").write_text("nameserver 10.77.0.99\n")
        hosts.set_names(host, "")
        hosts.start_sshd(host)
    # torch's agent and gloo look names up that nobody needs, and wait 10 s for each
    code, out, err = ended(hosts.over_ssh("h1,h2", *_ONE_EACH, folder=tmp_path), 300)
    assert (code, out) == (0, "total 3.0\n"), err


def test_a_master_name_that_the_first_host_takes_for_itself_is_survived(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['MASTER_ADDR'])")
    hosts.set_names("h1", _HOSTS + "127.0.1.1 h1\n")
    hosts.start_sshd("h1")
    code, out, err = ended(hosts.over_ssh("h1,h2", "--master_addr", "h1", *_ONE_EACH, folder=tmp_path), MOST_S)
    assert (code, out) == (0, "h1\n"), err


def test_the_network_of_the_master_address_is_the_one_in_use(hosts: Cluster, tmp_path: Path) -> None:
    """Two networks between the hosts: ssh uses one, the user names the other."""
    script(tmp_path, "print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])\n" + ALL_REDUCE)
    for n in (1, 2):
        space = hosts.space(f"h{n}")
        for words in (
            ["link", "add", f"fast{n}", "link", f"ve{n}", "type", "macvlan", "mode", "bridge"],
            ["addr", "add", f"10.88.0.{n}/24", "dev", f"fast{n}"],
            ["link", "set", f"fast{n}", "up"],
        ):
            subprocess.run(["ip", "-n", space, *words], check=True)
    options = ("--master_addr", "10.88.0.1", *_ONE_EACH)
    code, out, err = ended(hosts.over_ssh("h1,h2", *options, folder=tmp_path), MOST_S)
    assert (code, out) == (0, "10.88.0.1 fast1\ntotal 3.0\n"), err
