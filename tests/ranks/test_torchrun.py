"""torchrun or `whet launch` starts `whet qa`: after a death the ranks start again, with the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from many import free_port, losses, qa

from whet.watch import record

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")]

_FLAGS = ("--max_steps", "8", "--save_steps", "2", "--per_device_train_batch_size", "4")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_qa

    path = tmp_path_factory.mktemp("data") / "questions.json"
    path.write_text(json.dumps(tiny_qa.squad()), "utf-8")
    return path


_LAUNCHERS = {"torchrun": (["torch.distributed.run"], ["-m", "whet"]), "whet launch": (["whet", "launch"], ["--"])}


def _launched(launcher: str, folder: Path, encoder: Path, questions: Path, *flags: str) -> subprocess.Popen[str]:
    program, whet = _LAUNCHERS[launcher]
    words = [
        sys.executable, "-m", *program, "--nproc_per_node", "2", "--max_restarts", "2",
        "--master_port", str(free_port()), *whet, "qa", "--model_name_or_path", str(encoder),
        "--train_file", str(questions), "--do_train", "--max_seq_length", "40", "--doc_stride", "12",
        "--output_dir", str(folder), "--learning_rate", "1e-3", "--logging_steps", "1", "--precision", "fp32", *flags,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _rank(agent: int, rank: int) -> int | None:
    """Return the process of this rank, a child of the agent."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and f"\0RANK={rank}\0" in f"\0{path.joinpath('environ').read_text()}":
                return int(path.name)
        except (OSError, ValueError):
            continue
    return None


@pytest.mark.parametrize(("launcher", "killed"), [("torchrun", 0), ("torchrun", 1), ("whet launch", 1)])
def test_killed_rank_is_started_again_with_the_same_result(
    launcher: str, killed: int, tmp_path: Path, encoder: Path, questions: Path
) -> None:
    whole = qa(2, tmp_path / "whole", encoder, questions, *_FLAGS)
    assert [rank.code for rank in whole] == [0, 0], "\n".join(rank.err for rank in whole)
    run = _launched(launcher, tmp_path / "killed", encoder, questions, *_FLAGS)
    try:
        until = time.monotonic() + 90
        while not (tmp_path / "killed" / "checkpoint-2").exists() and time.monotonic() < until:
            time.sleep(0.005)
        process = _rank(run.pid, killed)
        assert process is not None
        os.kill(process, signal.SIGKILL)
        out, _ = run.communicate(timeout=150)
    finally:
        run.kill()
    assert run.returncode == 0, out
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert same[0] == same[1]
    begun = [one.begin["resumed_from"] for one in record.read(tmp_path / "killed").attempts]
    assert (len(begun), begun[0]) == (2, None), "rank 0 alone records, in each start"
    assert begun[1] in (2, 4, 6)


@pytest.mark.parametrize("there", ["checkpoints", "a model alone"])
def test_restart_of_a_refused_command_leaves_the_files_of_another_run(
    there: str, tmp_path: Path, encoder: Path, questions: Path
) -> None:
    """torchrun starts again whatever has failed; the folder holds a run that nobody asked to continue."""
    out, saves = tmp_path / "out", ("--save_strategy", "no") if there == "a model alone" else ()
    assert qa(1, out, encoder, questions, *_FLAGS, *saves)[0].code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    run = _launched("torchrun", out, encoder, questions, "--max_steps", "12", "--save_steps", "2")
    said, _ = run.communicate(timeout=150)
    assert run.returncode != 0, said
    assert said.count("output_dir is not empty") >= 3, "at each of the three starts"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_ranks_that_resume_with_powersgd_say_that_its_memory_begins_again(
    encoder: Path, questions: Path, tmp_path: Path
) -> None:
    hook = ("--ddp_comm_hook", "powersgd", "--max_steps", "4", "--save_steps", "2")
    assert [one.code for one in qa(2, tmp_path / "out", encoder, questions, *hook)] == [0, 0]
    place = tmp_path / "out" / "checkpoint-2"
    again = qa(2, tmp_path / "again", encoder, questions, *hook, "--resume_from_checkpoint", str(place))
    assert [one.code for one in again] == [0, 0]
    assert "powersgd keeps what it has not sent yet in no checkpoint" in " ".join(again[0].err.split())
