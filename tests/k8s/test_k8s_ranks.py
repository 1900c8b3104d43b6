"""What the pods of each kind start, started here: real torchrun, with the variables that the cluster would add."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plans import pod_of, rendered, variables_of

pytestmark = pytest.mark.reliability

_SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
facts = {"rank": dist.get_rank(), "of": dist.get_world_size(), "sum": total.item(), "threads": torch.get_num_threads()}
open(os.path.join(sys.argv[1], f"rank-{dist.get_rank()}.json"), "w").write(json.dumps(facts))
dist.destroy_process_group()
"""
_SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(float(sys.argv[2]))
    open(os.path.join(sys.argv[1], "saved"), "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(os.path.join(sys.argv[1], "started"), "w").close()
time.sleep(600)
"""


_QA = (
    "--model_name_or_path", "/app/distilbert-base-uncased", "--train_file", "/app/train.json", "--do_train",
    "--per_device_train_batch_size", "1", "--max_steps", "120", "--save_steps", "10", "--max_seq_length", "64",
    "--doc_stride", "16", "--output_dir", "/output/run", "--use_cpu",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def operators_variables(kind: str, number: int, port: int, n_pods: int) -> dict[str, str]:
    """Return what each controller adds to a pod, with this machine as the place where pods meet."""
    if kind == "pytorchjob":
        meet = {"PET_RDZV_ENDPOINT": f"localhost:{port}", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "squad"}
        return meet | {"PET_NNODES": f"{n_pods}:{n_pods}", "PET_MAX_RESTARTS": "10"}
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(number)}
    return here if kind == "job" else here | {"PET_NNODES": str(n_pods), "PET_NPROC_PER_NODE": "1"}


def started(
    manifests: list[dict[str, Any]], folder: Path, more: Mapping[str, str], places: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start what a pod starts, with its variables and the controller's; `places` are its folders here."""
    words = pod_of(manifests)["containers"][0]["command"]
    for there, here in (places or {"/app": str(folder)}).items():
        words = [word.replace(there, here) for word in words]
    variables = variables_of(manifests) | {"GLOO_SOCKET_IFNAME": "lo", "HOME": str(folder), "TMPDIR": str(folder)}
    variables |= {"HF_HOME": str(folder), "XDG_CACHE_HOME": str(folder), **more}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        words,
        env=variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "job"])
def test_the_ranks_of_two_pods_meet(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two pods of two ranks: all four meet, each with the threads of the plan."""
    (tmp_path / "train.py").write_text(_SCRIPT, "utf-8")
    manifests = rendered(capfd, "/app/train.py", "/app", kind=kind, nodes=2, nproc_per_node=2, cpus="4")
    port = free_port()
    pods = [started(manifests, tmp_path, operators_variables(kind, number, port, 2)) for number in range(2)]
    ended = [(pod.communicate(timeout=120)[1], pod.returncode) for pod in pods]
    assert [code for _, code in ended] == [0, 0], ended
    facts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert facts == [{"rank": rank, "of": 4, "sum": 10.0, "threads": 2} for rank in range(4)]


def test_ranks_may_save_for_longer_than_torchruns_own_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A save of 35 s after SIGTERM: torchrun alone kills its ranks after 30."""
    (tmp_path / "train.py").write_text(_SAVES, "utf-8")
    manifests = rendered(capfd, "/app/train.py", "/app", "35", kind="job", nproc_per_node=2, cpus="2")
    pod = started(manifests, tmp_path, operators_variables("job", 0, free_port(), 1))
    while not (tmp_path / "started").exists():
        time.sleep(0.1)
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=120)
    assert (tmp_path / "saved").exists()


def test_an_evicted_run_of_one_rank_resumes_in_the_next_pod(
    tmp_path: Path, stand_ins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM ends `whet qa` with 75 and a checkpoint; the same words, started again, continue from there."""
    manifests = rendered(capfd, "qa", *_QA, kind="job", cpus="1")
    here = {"/app": str(stand_ins), "/output": str(tmp_path), "/cache": str(tmp_path)}
    first = started(manifests, tmp_path, {"PYTHONUNBUFFERED": "1"}, here)
    while not list((tmp_path / "run").glob("checkpoint-*")) and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=120)[1]
    assert first.returncode == 75, said
    saved = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    second = started(manifests, tmp_path, {"PYTHONUNBUFFERED": "1"}, here)
    out, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert f"after step {int(saved.name.rpartition('-')[2])} of 120" in out
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 120


@pytest.mark.parametrize("kind", ["pytorchjob", "job"])  # a TrainJob's pods start like those of a Job
def test_two_pods_train_one_run_and_resume_after_an_eviction(
    kind: str, tmp_path: Path, stand_ins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two pods gets SIGTERM: both end, with one checkpoint; two new pods resume from it and finish."""
    manifests = rendered(capfd, "qa", *_QA, kind=kind, cpus="1", nodes=2, max_restarts=0)
    here = {"/app": str(stand_ins), "/output": str(tmp_path), "/cache": str(tmp_path)}

    def both() -> list[subprocess.Popen[str]]:
        port = free_port()
        return [started(manifests, tmp_path, operators_variables(kind, number, port, 2), here) for number in range(2)]

    evicted = both()
    while not list((tmp_path / "run").glob("checkpoint-*")) and evicted[0].poll() is None:
        time.sleep(0.1)
    evicted[1].send_signal(signal.SIGTERM)
    said = [pod.communicate(timeout=120) for pod in evicted]
    saved = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert all(pod.returncode != 0 for pod in evicted), said
    assert int(saved.name.rpartition("-")[2]) < 120, said
    again = both()
    said = [pod.communicate(timeout=180) for pod in again]
    assert [pod.returncode for pod in again] == [0, 0], said
    assert f"after step {int(saved.name.rpartition('-')[2])} of 120" in said[0][0] + said[1][0]
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 120


def test_an_elastic_job_continues_with_the_pod_that_is_left(
    tmp_path: Path, stand_ins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two pods is gone for good: torchrun starts the other's rank again, and it resumes alone."""
    manifests = rendered(capfd, "qa", *_QA, kind="pytorchjob", cpus="1", nodes=2, min_nodes=1, max_nodes=2)
    here = {"/app": str(stand_ins), "/output": str(tmp_path), "/cache": str(tmp_path)}
    port = free_port()
    both = [started(manifests, tmp_path, _elastic_variables(number, port), here) for number in range(2)]
    while not list((tmp_path / "run").glob("checkpoint-*")) and both[0].poll() is None:
        time.sleep(0.1)
    for process in (*children_of(both[1].pid), both[1].pid):
        os.kill(process, signal.SIGKILL)
    both[1].communicate(timeout=60)
    out, said = both[0].communicate(timeout=240)
    assert both[0].returncode == 0, (out, said[-3000:])
    assert "resumes    after step" in out
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 120


def children_of(parent: int) -> list[int]:
    """Return the ranks of a torchrun: they are in sessions of their own, but in one pod with it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def _elastic_variables(number: int, port: int) -> dict[str, str]:
    """Return the operator's variables; pod 0 keeps the store, as its name decides in a cluster."""
    meet = {"PET_NNODES": "1:2", "PET_RDZV_CONF": f"is_host={int(number == 0)},join_timeout=900,read_timeout=900"}
    return operators_variables("pytorchjob", number, port, 2) | meet
