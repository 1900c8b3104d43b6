"""Where rank 0 is, for launchers that do not say it: common networks, and Slurm's lists of nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whet.config.ranks import Place
from whet.dist import meeting
from whet.dist.launchers import pmi, slurm
from whet.dist.launchers.first_rank import common_network
from whet.errors import ConfigError


@pytest.mark.parametrize(
    ("of_ranks", "found"),
    [
        ([["192.168.1.1/24", "10.0.0.1/16"], ["10.0.3.2/16", "172.17.0.1/16"]], "10.0.0.1"),
        ([["172.17.0.1/16", "10.0.0.1/24"], ["172.18.0.1/16", "10.0.0.2/24"]], "10.0.0.1"),
        ([["10.0.0.1/24"], ["10.0.1.2/24"]], None),
        ([["172.17.0.1/16", "10.0.0.1/24"], ["172.17.0.1/16", "10.0.0.2/24"]], "10.0.0.1"),
        ([["172.17.0.1/16", "10.0.0.1/24"]] * 2 + [["10.0.0.2/24", "172.17.0.1/16"]] * 2, "10.0.0.1"),
        ([["172.17.0.1/16", "10.0.0.1/24"], ["172.17.0.1/16", "10.0.1.2/24"]], None),
        ([["10.0.0.1/24"], ["10.0.0.2/24", "172.17.0.1/16"], ["10.0.0.3/24", "172.17.0.1/16"]], "10.0.0.1"),
        ([["2001:db8::1/64"], ["10.0.0.1/24", "2001:db8::2/64"]], "2001:db8::1"),
        ([[], ["10.0.0.1/24"]], None),
    ],
)
def test_common_network_is_one_in_which_every_rank_has_an_address(of_ranks: list[list[str]], found: str | None) -> None:
    assert common_network(of_ranks) == found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1,n2", ["n1", "n2"]),
        ("node[08-10,12]", ["node08", "node09", "node10", "node12"]),
        ("a[1-2]x,login,b-[003]", ["a1x", "a2x", "login", "b-003"]),
        ("rack[1-2]node[09-10]", ["rack1node09", "rack1node10", "rack2node09", "rack2node10"]),
        ("rack[1-2]node[1,3],login1", ["rack1node1", "rack1node3", "rack2node1", "rack2node3", "login1"]),
        ("n[1-2]-[3-4]x,m", ["n1-3x", "n1-4x", "n2-3x", "n2-4x", "m"]),
        ("node[1-2,a]", ["node1", "node2", "nodea"]),
        ("n1, n2", ["n1", "n2"]),
        ("node[1-2", []),
        ("node[1-2]],b", []),
        ("", []),
    ],
)
def test_nodes_of_slurm_are_listed_in_order(text: str, names: list[str]) -> None:
    assert slurm.nodes({"SLURM_JOB_NODELIST": text}) == names


def test_port_of_slurm_is_the_same_for_all_ranks_of_a_step_and_another_for_the_next() -> None:
    step = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}
    assert slurm.port(step | {"SLURM_PROCID": "3"}) == slurm.port(step)
    assert slurm.port(step | {"SLURM_STEP_ID": "1"}) != slurm.port(step)
    assert 1024 < slurm.port(step) < 65536


def test_master_address_without_a_port_means_the_usual_port() -> None:
    place = Place(1, 4, 1, 2, "Intel MPI or MPICH")
    address = meeting.address_for(place, {"MASTER_ADDR": "10.0.0.1"})
    assert (address.host, address.port, address.from_launcher) == ("10.0.0.1", 29500, False)


def _wrapped(folder: Path) -> str:
    """Return a script that starts whet behind itself, as run scripts of users do."""
    path = folder / "run.sh"
    lines = (
        "import os",
        "from whet.config.ranks import here",
        "from whet.dist.meeting import address_for",
        "print(address_for(here(), os.environ))",
    )
    path.write_text(f"#!/bin/sh\nsh -c \"'{sys.executable}' -c '{'; '.join(lines)}'; true\"\ntrue\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("program", [["mpiexec.mpich"], ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]])
def test_ranks_behind_scripts_of_their_own_meet(program: list[str], tmp_path: Path) -> None:
    """Each rank has a parent of its own: the port follows from the launcher above."""
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    command = [*program, "-n", "2", _wrapped(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = done.stdout.split()
    assert len(found) == 2, done.stderr
    assert len(set(found)) == 1
    assert found[0].startswith("127.0.0.1:")


def test_launcher_without_an_exchange_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match="it is not known where the ranks meet") as caught:
        meeting.address_for(Place(1, 4, 1, 2, "PALS"), {})
    assert "MASTER_ADDR" in caught.value.problems[0].fix


def test_slurm_node_that_cannot_be_resolved_is_named() -> None:
    step = {"SLURM_STEP_NODELIST": "no-such-node-[1-2].invalid", "SLURM_NODEID": "1"}
    with pytest.raises(ConfigError, match=r"no-such-node-1\.invalid cannot be resolved"):
        meeting.address_for(Place(1, 2, 0, 1, "Slurm"), step)


def test_list_of_slurm_that_is_not_understood_is_shown() -> None:
    step = {"SLURM_STEP_NODELIST": "node[1-2", "SLURM_NODEID": "1"}
    with pytest.raises(ConfigError, match=r"not understood: node\[1-2"):
        meeting.address_for(Place(1, 2, 0, 1, "Slurm"), step)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"cmd=response_to_init rc=-1\n", "init was answered by"), (b"nonsense\n", "nonsense"), (b"", "nothing")],
)
def test_launcher_that_answers_otherwise_is_reported(answer: bytes, words: str) -> None:
    """The other end of the connection is a launcher that speaks something else, or is gone."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        theirs.recv(1024)
        theirs.sendall(answer)
        theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    environment = {"PMI_FD": str(os.dup(ours.fileno())), "PMI_RANK": "0", "PMI_SIZE": "2"}
    with ours, pytest.raises(pmi.PMIError, match=words):
        pmi.exchange("1,10.0.0.1/24", environment)
    thread.join()
    os.close(int(environment["PMI_FD"]))
