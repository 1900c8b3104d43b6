"""Real ranks of a run, each in a process of its own, and what they leave behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """What one rank printed, and how it ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(n_ranks: int, words: Sequence[str], cwd: Path, **more: str) -> list[subprocess.Popen[str]]:
    """Start a Python command once for each rank, with the variables that torchrun sets; one rank gets none."""
    plain = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    plain |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | more
    shared = {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(n_ranks):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if n_ranks > 1 else {}
        ranks.append(
            subprocess.Popen(
                [sys.executable, *words], cwd=cwd, env=plain | own, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return ranks


def ends(ranks: Sequence[subprocess.Popen[str]], within: float = 120) -> list[Ended]:
    """Wait for all ranks; those that are left then are killed, and the test fails."""
    try:
        return [Ended(*_communicate(rank, within)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _communicate(rank: subprocess.Popen[str], within: float) -> tuple[int, str, str]:
    out, err = rank.communicate(timeout=within)
    return rank.returncode, out, err


def qa(n_ranks: int, folder: Path, encoder: Path, questions: Path, *flags: str, within: float = 120) -> list[Ended]:
    """Run `whet qa` on tiny questions as so many ranks; `folder` is its output_dir."""
    words = [
        "-m", "whet", "qa", "--model_name_or_path", str(encoder), "--train_file", str(questions),
        "--validation_file", str(questions), "--do_train", "--do_eval", "--max_seq_length", "40", "--doc_stride", "12",
        "--output_dir", str(folder), "--learning_rate", "1e-3", "--logging_steps", "1", "--precision", "fp32", *flags,
    ]  # fmt: skip
    return ends(start(n_ranks, words, folder.parent), within)


def losses(folder: Path) -> list[float]:
    """Return the loss of each step, from the state that the run saved."""
    history = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def results(folder: Path) -> dict[str, Any]:
    """Return all metrics of the run."""
    return json.loads((folder / "all_results.json").read_text("utf-8"))


class Jobs:
    """Jobs that `forked.py` runs, all in one process that forks their ranks, and what each rank returned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, name: str, kind: str, n_ranks: int, **job: Any) -> None:
        """Add a job; its output folder is `out` next to the folder of its ranks."""
        self._jobs[name, n_ranks] = {"kind": kind, "n_ranks": n_ranks, "folder": str(self.folder(name, n_ranks))} | job

    def folder(self, name: str, n_ranks: int) -> Path:
        """Return the folder of a job's ranks."""
        return self._folder / f"{name.replace(' ', '-')}-{n_ranks}" / "ranks"

    def sizes(self, name: str) -> list[int]:
        """Return the numbers of ranks that a job was run with."""
        return [n for job, n in self._jobs if job == name]

    def run(self) -> Jobs:
        """Run all jobs, one after the other."""
        listed = self._folder / "jobs.json"
        listed.write_text(json.dumps([*self._jobs.values()]), "utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, str(Path(__file__).with_name("forked.py")), str(listed)]
        subprocess.run(words, check=True, env=environment, timeout=600)
        return self

    def __getitem__(self, job: tuple[str, int]) -> list[dict[str, Any]]:
        """Return what the ranks of a job returned, those that returned something."""
        found = [self.folder(*job) / f"rank-{rank}.json" for rank in range(job[1])]
        return [json.loads(path.read_text("utf-8")) for path in found if path.exists()]
