"""R8 on two hosts: a rank that is killed costs some steps and nothing else, once all are started again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_qa import command, squad

from namespaces import Cluster, cluster, missing
from not_shown import not_shown

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))
from host_runs import ended

pytestmark = pytest.mark.reliability


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := missing():
        not_shown("R8", why, "root, network namespaces and openssh-server")
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def job(model: Path, folder: Path) -> list[str]:
    """Return a run with a checkpoint every second step, and enough steps that a kill after the first comes in time."""
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps(squad()), "utf-8")
    options = {"per_device_train_batch_size": 4, "train_file": folder / "train.json", "max_steps": 60}
    return command(model, folder / "out", "--do_train", save_strategy="steps", save_steps=2, **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_after_a_killed_rank_are_those_of_a_run_without(
    rank: int, hosts: Cluster, encoder: Path, tmp_path: Path
) -> None:
    options = ("--nproc_per_node", "1", "--max_restarts", "1")
    words = job(encoder, tmp_path / "killed")
    process = hosts.over_ssh("h1,h2", *options, folder=tmp_path, command=words)
    until = time.monotonic() + 90
    while not list((tmp_path / "killed" / "out").glob("checkpoint-*")):
        assert time.monotonic() < until, ended(process)
        time.sleep(0.01)
    host = hosts.names[rank]
    found = [pid for pid, line in hosts.pids(host).items() if " -m whet qa" in line and "launch" not in line]
    os.kill(found[0], signal.SIGKILL)
    code, _, err = ended(process, 200)
    assert code == 0, err
    assert f"rank {rank} on {host} was killed by signal 9" in err, err
    assert "restart 1 of 1, on all hosts" in err
    words = job(encoder, tmp_path / "calm")
    code, _, err = ended(hosts.over_ssh("h1,h2", *options, folder=tmp_path, command=words), 200)
    assert code == 0, err
    weights = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("killed", "calm")]
    assert weights[0] == weights[1]
