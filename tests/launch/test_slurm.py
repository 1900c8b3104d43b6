"""Training in a step of a real Slurm: its controller and two nodes, each a host with a slurmd."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import ended
from test_hosts_training import debian_names, losses, whet_qa

from namespaces import Cluster, cluster, missing

pytestmark = [
    pytest.mark.reliability,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is missing: apt-get install slurm-wlm"),
]

_CURVE = 1e-5
"""Relative: the ranks' sums are added in another order than one process adds them."""
_CONFIG = """
ClusterName=test
SlurmctldHost=h1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=h1 NodeAddr=10.77.0.1 CPUs={cpus} State=UNKNOWN
NodeName=h2 NodeAddr=10.77.0.2 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Slurm's daemons on both hosts; the path of their configuration."""
    folder = tmp_path_factory.mktemp("slurm")
    config = folder / "slurm.conf"
    cpus = subprocess.run(["nproc", "--all"], check=True, capture_output=True, text=True).stdout.strip()
    config.write_text(_CONFIG.format(folder=folder, cpus=cpus))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for host in hosts.names:
        (folder / f"spool-{host}").mkdir()
    debian_names(hosts)
    commands = [("h1", ["slurmctld"]), *((host, ["slurmd", "-N", host]) for host in hosts.names)]
    daemons = [
        hosts.start(host, [*words, "-D", "-f", str(config)], stderr=subprocess.DEVNULL) for host, words in commands
    ]
    try:
        _wait_until_idle(hosts, config)
        yield config
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _wait_until_idle(hosts: Cluster, config: Path, within_s: float = 60) -> None:
    until, said = time.monotonic() + within_s, ""
    while "idle 2" not in said:
        assert time.monotonic() < until, said + _logs(config.parent)
        asked = hosts.start("h1", ["sinfo", "-h", "-o", "%T %D"], **hosts.piped(config.parent, SLURM_CONF=str(config)))
        said = "".join(asked.communicate(timeout=30))
        time.sleep(0.2)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-1000:] for path in folder.glob("*.log"))


@pytest.mark.parametrize("exchange", ["none", "pmi2"])
def test_training_under_srun_has_the_curve_of_one_process(
    exchange: str, slurm: Path, hosts: Cluster, encoder: Path, tmp_path: Path
) -> None:
    (alone := tmp_path / "alone").mkdir()
    subprocess.run([sys.executable, "-m", "whet", *whet_qa(encoder, alone, 1)], check=True, capture_output=True)
    (together := tmp_path / "together").mkdir()
    words = ["srun", f"--mpi={exchange}", "--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1"]
    words += [sys.executable, "-m", "whet", *whet_qa(encoder, together, 2)]
    process = hosts.start("h1", words, **hosts.piped(together, SLURM_CONF=str(slurm)))
    code, out, err = ended(process, 180)
    assert code == 0, err + out
    assert "2 ranks" in err + out
    assert losses(together) == pytest.approx(losses(alone), rel=_CURVE)
