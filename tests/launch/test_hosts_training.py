"""`whet launch --hosts ... -- qa`: the curve of one process, on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_runs import ended
from mpi_programs import PROGRAMS
from tiny_qa import command, squad

from namespaces import Cluster, cluster, missing
from not_shown import not_shown

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

_CURVE = 1e-5
"""Relative: the ranks' sums are added in another order than one process adds them."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made
        assert made.empty(2) == ""


def whet_qa(model: Path, folder: Path, n_ranks: int) -> list[str]:
    """Return the words of a job whose steps have 8 rows over all ranks."""
    data = folder / "train.json"
    data.write_text(json.dumps(squad()), "utf-8")
    options = {"per_device_train_batch_size": 8 // n_ranks, "train_file": data, "max_steps": 8, "logging_steps": 1}
    return command(model, folder / "out", "--do_train", **options)


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def debian_names(hosts: Cluster) -> None:
    """Have each host know the other by its address, and itself as 127.0.1.1."""
    hosts.set_names("h1", "127.0.0.1 localhost\n127.0.1.1 h1\n10.77.0.2 h2\n")
    hosts.set_names("h2", "127.0.0.1 localhost\n10.77.0.1 h1\n127.0.1.1 h2\n")


@pytest.fixture(scope="module")
def alone(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    words = [sys.executable, "-m", "whet", *whet_qa(encoder, folder, 1)]
    subprocess.run(words, check=True, capture_output=True, cwd=folder)
    return losses(folder)


@pytest.mark.parametrize("slots", [1, 2])
def test_training_over_ssh_has_the_curve_of_one_process(
    slots: int, hosts: Cluster, encoder: Path, alone: list[float], tmp_path: Path
) -> None:
    words = whet_qa(encoder, tmp_path, 2 * slots)
    process = hosts.over_ssh(f"h1:{slots},h2:{slots}", folder=tmp_path, command=words)
    code, _, err = ended(process, 240)
    assert code == 0, err
    assert losses(tmp_path) == pytest.approx(alone, rel=_CURVE)


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_training_under_mpirun_has_the_curve_of_one_process(
    name: str, per_host: int, hosts: Cluster, encoder: Path, alone: list[float], tmp_path: Path
) -> None:
    """The command line of guides and the first host's address; hosts know themselves as 127.0.1.1, as in Debian."""
    start, program, install = PROGRAMS[name]
    if program is None:
        not_shown("docs/ranks.md", f"{name} is missing", install)
    debian_names(hosts)
    words = [sys.executable, "-m", "whet", *whet_qa(encoder, tmp_path, 2 * per_host)]
    process = hosts.start("h1", start(hosts, tmp_path, words, per_host), **hosts.piped(tmp_path))
    code, _, err = ended(process, 120)
    assert code == 0, err
    assert losses(tmp_path) == pytest.approx(alone, rel=_CURVE)


def _by_torchrun(host: str) -> tuple[list[str], dict[str, str]]:
    number = "01"[host == "h2"]
    static = ["--nnodes", "2", "--node-rank", number, "--master-addr", "10.77.0.1", "--master-port", "29511"]
    return ["-m", "torch.distributed.run", "--nproc-per-node", "1", *static], {}


def _by_torchrun_c10d(host: str) -> tuple[list[str], dict[str, str]]:
    """With what docs/ranks.md adds where hosts know themselves as 127.0.1.1."""
    first = host == "h1"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29511", "--rdzv-id", "job", "--nnodes", "2"]
    known = ["--rdzv-conf", f"is_host={int(first)}", "--local-addr", "10.77.0.1" if first else "10.77.0.2"]
    return ["-m", "torch.distributed.run", "--nproc-per-node", "1", *meeting, *known], {}


def _by_hand(host: str) -> tuple[list[str], dict[str, str]]:
    """By variables, with the name of the first host, which itself resolves it to 127.0.1.1."""
    variables = {"RANK": "01"[host == "h2"], "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29511"}
    return [], variables


def _by_srun(host: str) -> tuple[list[str], dict[str, str]]:
    """Return the variables of Slurm alone: its daemons do not run here."""
    number = "01"[host == "h2"]
    step = {
        "JOB_ID": "4711",
        "STEP_ID": "0",
        "STEP_NUM_TASKS": "2",
        "STEP_NODELIST": "h[1-2]",
        "TASKS_PER_NODE": "1(x2)",
    }
    place = {"PROCID": number, "NODEID": number, "LOCALID": "0"}
    return [], {f"SLURM_{name}": value for name, value in (step | place).items()}


@pytest.mark.parametrize("by", [_by_torchrun, _by_torchrun_c10d, _by_srun, _by_hand])
def test_training_under_other_launchers_has_the_curve_of_one_process(
    by: Callable[[str], tuple[list[str], dict[str, str]]],
    hosts: Cluster,
    encoder: Path,
    alone: list[float],
    tmp_path: Path,
) -> None:
    debian_names(hosts)
    ranks: list[subprocess.Popen[str]] = []
    for host in hosts.names:
        words, variables = by(host)
        command = [sys.executable, *words, "-m", "whet", *whet_qa(encoder, tmp_path, 2)]
        ranks.append(hosts.start(host, command, **hosts.piped(tmp_path, **variables)))
    for code, _, err in [ended(rank, 120) for rank in ranks]:
        assert code == 0, err
    assert losses(tmp_path) == pytest.approx(alone, rel=_CURVE)
