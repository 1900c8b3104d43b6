"""What ranks that are started again know, what stays of the attempt that failed, and signals that come twice."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from test_launch_ranks import ended, launched, linux, pids, script, two_cores

from whet.launch import local

pytestmark = [linux, two_cores, pytest.mark.slow]


@pytest.mark.parametrize("n_ranks", ["1", "2"])
def test_ranks_know_that_they_were_started_again(n_ranks: str, tmp_path: Path) -> None:
    """Scripts with engine.Trainer resume then, as under torchrun; the log of the attempt that failed is kept."""
    script(tmp_path, """
n, most = (int(os.environ["TORCHELASTIC_" + name]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
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


def test_the_end_of_a_huge_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    with log.open("wb") as file:
        file.seek(4 << 30)  # takes no room on the disk, and more memory than a reader of all of it may have
        file.write(b"\nlast but one\nlast\n")
    assert local.tail(log, 2) == ["last but one", "last"]
