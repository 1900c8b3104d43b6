"""Runs jobs as 1, 2 or more ranks, forked from this one process so that torch is imported once.

    python forked.py JOBS.json

JOBS.json lists {"kind", "n_ranks", "folder", ...}. Each rank calls the function KIND of a module of jobs, such as
`jobs_of_ranks.py`, with its job and writes what it returns, or the error, to FOLDER/rank-R.json.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jobs_of_joins
import jobs_of_loops
import jobs_of_messages
import jobs_of_planted
import jobs_of_ranks
import jobs_of_shares
import torch
from many import free_port

_LONGEST_S = 90.0


_MEET_ROGUES = ("meets_rogue", "trains_with_rogue")


def _refuse_pickles() -> None:
    """Let torch's object collectives fail in this process, whoever calls them: what they receive is unpickled."""

    class Refused:
        def __init__(self, *_: Any) -> None:
            raise AssertionError("a rank unpickles what other ranks send")

    torch.distributed.distributed_c10d._unpickler = Refused  # pyright: ignore


def _rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Run this rank of the job, and end the process."""
    code = 1
    try:
        folder, n_ranks = Path(job["folder"]), job["n_ranks"]
        output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if n_ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(job.get("environment", {}))
        if job["kind"] not in _MEET_ROGUES:
            _refuse_pickles()
        try:
            homes = (
                jobs_of_joins, jobs_of_messages, jobs_of_planted, jobs_of_shares, jobs_of_loops,
                jobs_of_ranks,
            )  # fmt: skip
            home = next(one for one in homes if job["kind"] in vars(one))
            found = getattr(home, job["kind"])(job, rank)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            found = {"error": type(error).__name__, "text": str(error), "code": getattr(error, "exit_code", None)}
        found["ended_s"] = time.time()
        (folder / f"rank-{rank}.json").write_text(json.dumps(found), "utf-8")
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run(job: dict[str, Any]) -> None:
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    port, ranks = free_port(), []
    for rank in range(job["n_ranks"]):
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port)
        ranks.append(pid)
    until = time.monotonic() + job.get("within_s", _LONGEST_S)
    while ranks and time.monotonic() < until:
        ranks = [pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    gc.freeze()  # what was imported is neither searched nor counted by the ranks: half a million objects
    for each in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        _run(each)
