"""Where ranks meet if their launcher does not say it, and through which interface."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whet.config.ranks import Place
from whet.dist import group
from whet.dist.group import Address, address_for
from whet.errors import ConfigError

_APART = Place(1, 4, 1, 2, "Slurm")
_BY_MPI = Place(1, 4, 1, 2, "Intel MPI or MPICH")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("n1,n2", "n1"),
        ("node[08-10,12]", "node08"),
        ("a[1-2]x,login,b-[003]", "a1x"),
        ("rack[1-2]node[09-10]", "rack1node09"),
        ("node[a,1-2]", "nodea"),
        (" b-[003], n1", "b-003"),
    ],
)
def test_ranks_of_slurm_meet_on_the_first_node(text: str, name: str) -> None:
    step = {"SLURM_STEP_NODELIST": text, "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}
    address = address_for(_APART, step)
    assert (address.host, address.init_method) == (name, f"tcp://{name}:{address.port}")
    assert address_for(_APART, step | {"SLURM_PROCID": "3"}) == address
    assert address_for(_APART, step | {"SLURM_STEP_ID": "1"}).port != address.port
    assert 1024 < address.port < 65536


@pytest.mark.parametrize("text", ["", "node[1-2"])
def test_list_of_slurm_that_names_no_node_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it is not known where the ranks meet"):
        address_for(_APART, {"SLURM_STEP_NODELIST": text})


def test_ranks_of_mpi_on_several_machines_need_an_address_and_say_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="it is not known where the ranks meet") as caught:
        address_for(_BY_MPI, {})
    assert "mpirun -genv MASTER_ADDR NAME" in caught.value.problems[0].fix
    address = address_for(_BY_MPI, {"MASTER_ADDR": "10.0.0.1"})
    assert (address.host, address.port, address.init_method) == ("10.0.0.1", 29500, "tcp://10.0.0.1:29500")


@pytest.mark.parametrize("given", ["node1", "10.0.0.1", None])
def test_ranks_of_one_machine_meet_on_loopback_whatever_the_address(given: str | None) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29511"}
    address = address_for(Place(0, 2, 0, 2, "torchrun"), variables | ({"MASTER_ADDR": given} if given else {}))
    assert address.init_method == "tcp://127.0.0.1:29511"


def test_ranks_of_torchs_agent_join_at_its_store() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29511"}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert address_for(Place(0, 2, 0, 2, "torchrun"), variables).init_method == "env://"


@pytest.mark.parametrize("port", ["none", "0", "65536"])
def test_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT is not a port"):
        address_for(_BY_MPI, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port})


def test_machine_that_takes_the_address_for_itself_uses_its_only_interface() -> None:
    """Debian and Ubuntu give a machine's own name the address 127.0.1.1."""
    address = Address("127.0.1.1", 29500, from_launcher=True)
    assert group._leading_to(_APART, address, {"10.0.0.1": "eth0", "2001:db8::1": "eth0"}) == "eth0"
    with pytest.raises(ConfigError, match="it is not known which network interface leads to the other ranks") as caught:
        group._leading_to(_APART, address, {"10.0.0.1": "eth0", "10.1.0.1": "ib0"})
    assert "eth0, ib0" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in caught.value.problems[0].fix


def _wrapped(folder: Path) -> str:
    """Return a script that starts whet behind itself, as run scripts of users do."""
    path = folder / "run.sh"
    lines = (
        "import os",
        "from whet.config.ranks import here",
        "from whet.dist.group import address_for",
        "print(address_for(here(), os.environ))",
    )
    path.write_text(f"#!/bin/sh\nsh -c \"'{sys.executable}' -c '{'; '.join(lines)}'; true\"\ntrue\n")
    path.chmod(0o755)
    return str(path)


_BY_HAND = """
for rank in 0 1; do PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 {script} & done
wait
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["mpiexec.mpich", "mpirun.openmpi", "sh"])
def test_ranks_behind_scripts_of_their_own_meet(program: str, tmp_path: Path) -> None:
    """Each rank has a parent of its own: the port follows from the launcher above."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    words = {
        "mpiexec.mpich": ["-n", "2", _wrapped(tmp_path)],
        "mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe", "-n", "2", _wrapped(tmp_path)],
        "sh": ["-c", _BY_HAND.format(script=_wrapped(tmp_path))],
    }
    done = subprocess.run([program, *words[program]], capture_output=True, text=True, timeout=60, check=True)
    found = done.stdout.split()
    assert len(found) == 2, done.stderr
    assert len(set(found)) == 1
    assert found[0].startswith("127.0.0.1:")
