"""What ranks that are started again know, what stays of the attempt that failed, and signals that come twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_launch_ranks import ended, launched, linux, pids, script, two_cores

from whet.errors import EXIT_IO
from whet.launch import rank
from whet.launch.arguments import HostsArguments, LaunchArguments
from whet.launch.over_ssh import Orders

pytestmark = [linux, two_cores, pytest.mark.slow]


@pytest.mark.parametrize("n_ranks", [pytest.param("1", marks=pytest.mark.night), "2"])
def test_ranks_know_that_they_were_started_again(n_ranks: str, tmp_path: Path) -> None:
    """Scripts with the engine resume then, as under torchrun; the log of the attempt that failed is kept."""
    script(tmp_path, """
n, most = (int(os.environ["TORCHELASTIC_" + name]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
open("launches", "a").write(os.environ["WHET_LAUNCH_ID"] + "\\n")
print("attempt", n, "of", most, flush=True)
sys.exit(9 if n < 1 and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1 else 0)
""")  # fmt: skip
    stale = {"TORCHELASTIC_RESTART_COUNT": "7"}
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", n_ranks, "--max_restarts", "3", **stale))
    assert code == 0, err
    if n_ranks == "2":
        out = (tmp_path / "launch-logs" / "rank-1.log").read_text("utf-8")
        assert "--- whet launch: restart 1 ---" in out
    assert "attempt 0 of 3" in out
    assert "attempt 1 of 3" in out
    assert len({*(tmp_path / "launches").read_text("utf-8").split()}) == 1, "all attempts are of one launch"


@pytest.mark.reliability
def test_a_terminal_that_closes_leaves_time_to_save(tmp_path: Path) -> None:
    """The shell and the kernel both send SIGHUP: that is one request, and not a second one that kills."""
    script(tmp_path, """
def save(number, frame):
    time.sleep(1)
    open(f"saved-{rank}", "w").write(str(number))
    os._exit(75)
signal.signal(signal.SIGHUP, save)
open(f"pid-{rank}-ready", "w").write(str(os.getpid()))
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    pids(tmp_path, 4)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    process.send_signal(signal.SIGHUP)
    assert ended(process)[0] == 75
    assert [(tmp_path / f"saved-{n}").read_text() for n in range(2)] == [str(int(signal.SIGHUP))] * 2


@pytest.mark.parametrize("code", [75, pytest.param(78, marks=pytest.mark.night)])
def test_ranks_that_saved_and_stopped_or_were_refused_are_not_started_again(code: int, tmp_path: Path) -> None:
    script(tmp_path, f"""
open(f"started-{{rank}}", "a").write("x")
sys.exit({code})
""")  # fmt: skip
    found, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", "--max_restarts", "3"))
    assert found == code, err
    assert {path.read_text() for path in tmp_path.glob("started-*")} == {"x"}
    assert "restart 1" not in err


@pytest.mark.reliability
def test_rank_that_has_saved_leaves_the_others_the_time_to_do_so(tmp_path: Path) -> None:
    """More than the 4 seconds that ranks have when another one fails."""
    script(tmp_path, """
time.sleep(6 if rank else 0.5)
open(f"saved-{rank}", "w").close()
sys.exit(75)
""")  # fmt: skip
    assert ended(launched(tmp_path, "--nproc_per_node", "2"))[0] == 75
    assert (tmp_path / "saved-1").exists()


@pytest.mark.reliability
def test_a_signal_ends_the_ranks_for_good_however_they_end(tmp_path: Path) -> None:
    """A script that does not handle SIGTERM is killed by it, which is no failure to start again from."""
    script(tmp_path, "open(f'started-{rank}', 'a').write('x')\ntime.sleep(600)")
    process = launched(tmp_path, "--nproc_per_node", "2", "--max_restarts", "3")
    pids(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM, err
    assert [(tmp_path / f"started-{n}").read_text() for n in range(2)] == ["x", "x"]


_WAITS = b"waiting for node 1 of 2"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _waits(process: subprocess.Popen[bytes]) -> None:
    """Read what a launcher says until it waits for another node."""
    assert process.stderr is not None
    said = b""
    while _WAITS not in b" ".join(said.split()):
        more = os.read(process.stderr.fileno(), 1 << 16)
        assert more, said
        said += more


@contextmanager
def _waiting(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    script(folder, "")
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_signal_before_any_rank_runs_is_no_success(tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(_free_port()))
    with _waiting(tmp_path, "whet", "launch", *words, "--nproc_per_node", "1", "--", "train.py") as process:
        _waits(process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 128 + signal.SIGUSR1


def test_a_node_whose_launcher_is_gone_before_any_rank_runs_is_no_success(tmp_path: Path) -> None:
    asked: dict[str, Any] = asdict(LaunchArguments(nproc_per_node="1", command=("train.py",)))
    place = asdict(HostsArguments(nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=_free_port()))
    orders = Orders(asked, place, str(tmp_path), {}, (), (), silence_s=60)
    with _waiting(tmp_path, "whet.launch") as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
        process.stdin.flush()
        _waits(process)
        process.stdin.close()
        assert process.wait(30) == EXIT_IO


@pytest.mark.reliability
def test_ranks_and_launcher_listen_on_loopback_alone(tmp_path: Path) -> None:
    """Nobody outside can take the place of a rank: every port of the launcher and of the ranks is at 127.0.0.1."""
    script(tmp_path, _LISTENS)
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2"), 120)
    assert code == 0, err
    for rank_ in range(2):
        found = json.loads((tmp_path / f"listens-{rank_}.json").read_text("utf-8"))
        assert found["launcher"] == ["0100007F"], found
        assert set(found["rank"]) <= {"0100007F"}, found


_LISTENS = """
import torch, torch.distributed as dist

def listens(pid):
    of_pid = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if exists(pid, fd)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in of_pid]

def exists(pid, fd):
    return os.path.lexists(f"/proc/{pid}/fd/{fd}")

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
found = {"rank": listens(os.getpid()), "launcher": listens(parent(os.getppid()))}
json.dump(found, open(f"listens-{rank}.json", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_the_end_of_a_huge_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    with log.open("wb") as file:
        file.seek(4 << 30)  # takes no room on the disk, and more memory than a reader of all of it may have
        file.write(b"\nlast but one\nlast\n")
    assert rank.tail(log, 2) == ["last but one", "last"]
