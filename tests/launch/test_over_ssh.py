"""`whet launch --hosts` through a program in the place of ssh, which runs everything on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_launch_ranks import ended, gone, launched, linux, pids, script, two_cores

pytestmark = [linux, two_cores, pytest.mark.slow]

_FAKE = """#!/bin/sh
# NAME COMMAND: a host that has the given name, and what the variable EDIT_NAME (a command of sed) makes of its answers
[ -e gone-$1 ] && { echo "Connection refused" >&2; exit 255; }
printf 'a line of its start files'
case "$2" in
*doctor*)
    called=$(eval echo "\\${CALLED_$1:-$1}") edit=$(eval echo "\\$EDIT_$1")
    sh -c "$2" | sed "s/^whet-host: [^ ]*/whet-host: $called/; $edit" ;;
*) exec sh -c "$2" ;;
esac
"""


def _usual(folder: Path, hosts: str) -> tuple[str, ...]:
    fake = folder / "fake-ssh"
    fake.write_text(_FAKE, "utf-8")
    fake.chmod(0o755)
    return ("--hosts", hosts, "--ssh_command", str(fake), "--master_addr", "127.0.0.1", "--nproc_per_node", "1")


def _over(folder: Path, hosts: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    return launched(folder, *_usual(folder, hosts), *options, **more)


def _refused(process: subprocess.Popen[str]) -> str:
    code, out, err = ended(process, 120)
    assert (code, out) == (78, ""), err
    return " ".join(err.split())


@pytest.mark.reliability
def test_ranks_of_two_hosts_find_each_other(tmp_path: Path) -> None:
    script(tmp_path, """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("total", total.item())
json.dump(dict(os.environ), open(f"rank-{rank}.json", "w"))
dist.destroy_process_group()
""")  # fmt: skip
    variables = {"HF_HOME": "/hf", "OTHER": "1", "GLOO_SOCKET_IFNAME": "lo"}
    code, out, err = ended(_over(tmp_path, "a,b:2", "--env", "COLOUR=a b", **variables), 120)
    assert code == 0, err
    assert "total 6.0\n" in out
    assert "3 ranks on 2 hosts, master 127.0.0.1" in err
    assert "b:   " in err  # what another host prints is shown with its name
    ranks = [json.loads((tmp_path / f"rank-{n}.json").read_text("utf-8")) for n in range(3)]
    assert [(one["GROUP_RANK"], one["LOCAL_RANK"]) for one in ranks] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert all((one["WORLD_SIZE"], one["HF_HOME"], one["COLOUR"]) == ("3", "/hf", "a b") for one in ranks)
    assert (tmp_path / "launch-logs" / "rank-2.log").read_text("utf-8").count("total 6.0") == 1


@pytest.mark.reliability
def test_secret_is_in_no_command_line_on_the_way(tmp_path: Path) -> None:
    """Neither in that of ssh, nor in that of what it starts."""
    script(tmp_path, """
def lines_above(pid):
    while pid > 1:
        yield open(f"/proc/{pid}/cmdline").read()
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
open("lines", "w").write("\\n".join(lines_above(os.getpid())))
open("words", "w").write(" ".join(sys.argv[1:]))
""")  # fmt: skip
    fake = _over(tmp_path, "a", "--env", "HF_TOKEN=one-of-mine")
    assert ended(fake)[0] == 0
    lines = (tmp_path / "lines").read_text("utf-8").replace("\0", " ")
    of_hosts = [line for line in lines.splitlines() if "whet launch" not in line.replace("-m whet", "whet")]
    assert any("-m whet.launch " in line for line in of_hosts)
    assert "one-of-mine" not in "\n".join(of_hosts)


def test_every_host_with_other_software_is_named_at_once_with_its_fix(tmp_path: Path) -> None:
    script(tmp_path, "")
    odd = {
        "EDIT_b": 's/"torch": "[^"]*"/"torch": "2.9.0+cpu"/',
        "EDIT_c": 's/"python": "[^"]*"/"python": "2.7.1"/; s/"whet": "[^"]*"/"whet": "9.0"/',
    }
    err = _refused(_over(tmp_path, "a,b,c,d", **odd, CALLED_d="a"))
    assert "b: another version of torch" in err
    assert "c: another version of Python" in err
    assert "c: another version of whet" in err
    assert "or name another Python with --python" in err
    assert "d is the same machine as a" in err
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.reliability
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    process = _over(tmp_path, "a,b")
    every = pids(tmp_path, 2, within=60)
    process.kill()
    assert gone(every, within=8)
    process.communicate()


_LOSES_A_HOST = """
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 1:
        open("gone-b", "w").close()
        if sys.argv[1] == "returns":
            subprocess.Popen(["sh", "-c", "sleep 6; rm gone-b"], start_new_session=True)
        os.kill(parent(os.getppid()), signal.SIGKILL)
    time.sleep(600)
"""
_SHORT_WAIT = """
import sys
from whet.launch import over_ssh
over_ssh._RETURNS_S, over_ssh._ASKS_AGAIN_S = 1.0, 0.5
from whet.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.reliability
def test_a_restart_waits_for_a_host_that_was_lost(tmp_path: Path) -> None:
    script(tmp_path, _LOSES_A_HOST)
    code, _, err = ended(_over(tmp_path, "a,b", "--max_restarts", "1", command=("train.py", "returns")), 180)
    assert code == 0, err
    said = " ".join(err.split())
    assert "restart 1 of 1, on all hosts" in said
    assert "waiting for the hosts, for 5m00s at most: b cannot be reached (Connection refused)" in said


@pytest.mark.reliability
def test_hosts_that_stay_away_use_the_restarts_up_and_the_failure_is_that_of_the_run(tmp_path: Path) -> None:
    script(tmp_path, _LOSES_A_HOST)
    words = [*_usual(tmp_path, "a,b"), "--max_restarts", "2", "--", "train.py", "stays"]
    process = subprocess.Popen(
        [sys.executable, "-c", _SHORT_WAIT, "launch", *words], cwd=tmp_path, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    code, _, err = ended(process, 180)
    assert code == 74, err
    assert " ".join(err.split()).count("the hosts did not come back within") == 2
