"""`whet launch` with real processes: what ranks get, how they end, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_preload import a_library

from whet.errors import EXIT_CANNOT_CREATE

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the launcher is for Linux")
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
pytestmark = [linux, two_cores, pytest.mark.slow]

_PRELUDE = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ.get("RANK", "0"))
open(f"pid-{rank}", "w").write(str(os.getpid()))
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(_PRELUDE + text, "utf-8")
    return path


def launched(folder: Path, *options: str, command: Sequence[str] = ("train.py",), **more: str) -> subprocess.Popen[str]:
    """Start the launcher in the folder, in a session of its own."""
    words = [
        sys.executable,
        "-m",
        "whet",
        "launch",
        "--memory_allocator",
        "default",
        "--openmp",
        "default",
        *options,
        "--",
        *command,
    ]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | more
    return subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


_SHOWS = """
def cmdline(pid):
    return open(f"/proc/{pid}/cmdline").read()

shown = [cmdline(os.getpid()), cmdline(os.getppid())]
held = [name for name, value in os.environ.items() if "of-mine" in value]
open(f"words-{rank}.json", "w").write(json.dumps([sys.argv[1:], shown, held, __name__, sys.path[0]]))
"""


@pytest.mark.reliability
@pytest.mark.parametrize("first", [("train.py",), ("-m", "train"), (sys.executable, "train.py")])
def test_secrets_of_the_users_words_are_in_no_command_line_of_a_rank(tmp_path: Path, first: Sequence[str]) -> None:
    script(tmp_path, _SHOWS)
    words = [
        "--hub_token",
        "one-of-mine",
        "--token=two-of-mine",
        "--url",
        "https://me:three-of-mine@host/x",
        "--lr",
        "1",
    ]
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", command=(*first, *words)))
    assert code == 0, err
    for rank in range(2):
        own, shown, held, name, path = json.loads((tmp_path / f"words-{rank}.json").read_text())
        assert own == words
        assert (name, Path(path)) == ("__main__", tmp_path)
        assert "of-mine" not in "".join(shown)
        assert "--hub_token" in shown[0]
        assert held == []


def test_secret_for_a_program_that_is_not_python_is_refused(tmp_path: Path) -> None:
    code, _, err = ended(launched(tmp_path, command=("echo", "--password", "one-of-mine")))
    assert code == 78
    assert "the command line of each rank would show a secret" in err
    assert "one-of-mine" not in err


def ended(process: subprocess.Popen[str], within: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def pids(folder: Path, n: int, within: float = 30) -> list[int]:
    """Wait until n ranks have written their process ids; return these."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        found = [path.read_text() for path in sorted(folder.glob("pid-*"))]
        if len(found) >= n and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(every: Sequence[int], within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(alive(pid) for pid in every):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.glob("pid-*"):
        assert not alive(int(path.read_text())), f"{path.name} is still running"


def test_each_rank_has_its_cores_threads_and_place(tmp_path: Path) -> None:
    script(tmp_path, """
found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_ADDR")}
json.dump(found | {"cpus": sorted(os.sched_getaffinity(0))}, open(f"rank-{rank}.json", "w"))
""")  # fmt: skip
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", OMP_NUM_THREADS="7", OMP_PROC_BIND="close"))
    assert code == 0, err
    ranks: list[Any] = [json.loads((tmp_path / f"rank-{n}.json").read_text()) for n in range(2)]
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in ranks] == [("0", "2", "0"), ("1", "2", "1")]
    assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
    assert all(int(one["OMP_NUM_THREADS"]) <= len(one["cpus"]) for one in ranks)
    assert "rank 1:" in err
    assert "OMP_NUM_THREADS=7 gives way" in err
    assert "OMP_PROC_BIND=close is left out" in err


def test_one_rank_is_a_plain_process(tmp_path: Path) -> None:
    """A script that knows nothing of ranks finds none of their variables."""
    script(tmp_path, "print(sorted(set(os.environ) & {'RANK', 'WORLD_SIZE', 'MASTER_ADDR'}), sys.argv[1:])")
    code, out, _ = ended(launched(tmp_path, "--nproc_per_node", "1", command=("train.py", "--", "--x", "1")))
    assert (code, out) == (0, "[] ['--', '--x', '1']\n")


def test_one_rank_has_no_logs_that_must_be_writable(tmp_path: Path) -> None:
    """As in a folder that is mounted to be read: here its name is taken by a file."""
    script(tmp_path, "print('ran')")
    (tmp_path / "launch-logs").write_text("a file")
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "1"))
    assert (code, out) == (0, "ran\n"), err


def test_ranks_find_each_other_through_torch_distributed(tmp_path: Path) -> None:
    script(tmp_path, """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
""")  # fmt: skip
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "2"), 120)
    assert code == 0, err
    assert out == "total 3.0\n"
    assert "total 3.0" in (tmp_path / "launch-logs" / "rank-1.log").read_text()


def test_a_rank_that_fails_stops_the_others_within_five_seconds(tmp_path: Path) -> None:
    """Even one that ignores SIGTERM; the end of the failed rank's output is shown."""
    script(tmp_path, """
if rank == 1:
    time.sleep(1)
    print("the disk is on fire")
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    every = pids(tmp_path, 2)
    while alive(every[1]):
        time.sleep(0.02)
    failed_at = time.monotonic()
    while alive(every[0]):
        time.sleep(0.02)
    assert time.monotonic() - failed_at < 5.5  # SIGKILL comes after 4 s; the rest is for a busy machine
    code, _, err = ended(process)
    assert code == 3
    assert "rank 1 ended with exit code 3; all ranks were stopped" in err
    assert "  | the disk is on fire" in err


@pytest.mark.reliability
def test_a_rank_that_is_killed_is_reported_as_shells_do(tmp_path: Path) -> None:
    script(tmp_path, "time.sleep(600)")
    process = launched(tmp_path, "--nproc_per_node", "2")
    os.kill(pids(tmp_path, 2)[1], signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was killed by signal 9" in err


@pytest.mark.parametrize("ignores", [False, pytest.param(True, marks=pytest.mark.reliability)])
def test_no_rank_outlives_a_launcher_that_is_killed(ignores: bool, tmp_path: Path) -> None:
    """Nor what the ranks have started, such as loader processes, nor a rank that ignores SIGTERM."""
    script(tmp_path, f"ignores = {ignores}" + """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"pid-{rank}-child", "w").write(str(child.pid))
if rank and ignores:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    every = pids(tmp_path, 4)
    process.kill()
    assert gone(every, within=6)
    process.communicate()


def test_second_launcher_in_a_folder_does_not_overwrite_the_logs_of_the_first(tmp_path: Path) -> None:
    """A launcher that was killed is in nobody's way."""
    script(tmp_path, "print(sys.argv[1], flush=True)\ntime.sleep(float(sys.argv[2]))")
    first = launched(tmp_path, "--nproc_per_node", "2", command=("train.py", "first", "600"))
    every = pids(tmp_path, 2)
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", command=("train.py", "second", "0")))
    assert code == EXIT_CANNOT_CREATE
    assert "use another --log_dir" in err
    first.kill()
    assert gone(every, within=6)
    first.communicate()
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", command=("train.py", "third", "0")))
    assert code == 0, err
    assert (tmp_path / "launch-logs" / "rank-1.log").read_text() == "third\n"


@pytest.mark.reliability
def test_no_rank_outlives_its_guardian(tmp_path: Path) -> None:
    script(tmp_path, "time.sleep(600)")
    process = launched(tmp_path, "--nproc_per_node", "2")
    every = pids(tmp_path, 2)
    guardian = int(Path(f"/proc/{every[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guardian, signal.SIGKILL)
    code, _, _ = ended(process)
    assert code == 128 + signal.SIGKILL
    assert gone(every, within=5)


@pytest.mark.parametrize(
    ("number", "save_s"),
    [
        (signal.SIGTERM, 0.5),
        (signal.SIGUSR1, 0.5),  # which Slurm sends before the time is up
        *(
            pytest.param(one, 5, marks=pytest.mark.reliability)
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_a_signal_reaches_every_rank_and_leaves_it_time_to_save(
    number: signal.Signals, save_s: float, tmp_path: Path
) -> None:
    """More than the 4 seconds that ranks have when another one fails, by night."""
    script(tmp_path, f"save_s = {save_s}" + """
def save(number, frame):
    time.sleep(save_s)
    open(f"saved-{rank}", "w").write(str(number))
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, save)
open(f"pid-{rank}-ready", "w").write(str(os.getpid()))
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    pids(tmp_path, 4)
    process.send_signal(number)
    code, _, _ = ended(process)
    assert code == 75
    assert [(tmp_path / f"saved-{n}").read_text() for n in range(2)] == [str(int(number))] * 2


def test_a_signal_to_every_process_of_a_job_leaves_ranks_the_time_to_save(tmp_path: Path) -> None:
    """As Slurm and systemd send it: also to the processes around the ranks, which is no failure of another rank."""
    script(tmp_path, """
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)  # it comes from Slurm and from the launcher
    time.sleep(5)
    open(f"saved-{rank}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"pid-{rank}-ready", "w").write(str(os.getpid()))
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    ranks = set(pids(tmp_path, 4))
    around = [int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1]) for one in ranks]
    for one in (*around, *ranks, process.pid):
        os.kill(one, signal.SIGTERM)
    assert ended(process)[0] == 75
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.reliability
def test_a_second_signal_ends_ranks_that_do_not(tmp_path: Path) -> None:
    script(tmp_path, """
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"pid-{rank}-ready", "w").write(str(os.getpid()))
time.sleep(600)
""")  # fmt: skip
    process = launched(tmp_path, "--nproc_per_node", "2")
    pids(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process, 10)[0] == 128 + signal.SIGKILL


def test_restarts_begin_anew_with_all_ranks(tmp_path: Path) -> None:
    script(tmp_path, """
tries = f"tries-{rank}"
n = int(open(tries).read()) if os.path.exists(tries) else 0
open(tries, "w").write(str(n + 1))
if rank == 1 and n < 2:
    sys.exit(9)
time.sleep(0 if n == 2 else 60)
""")  # fmt: skip
    code, _, err = ended(launched(tmp_path, "--nproc_per_node", "2", "--max_restarts", "3"))
    assert code == 0, err
    assert [(tmp_path / f"tries-{n}").read_text() for n in range(2)] == ["3", "3"]
    assert "restart 2 of 3" in err


@pytest.mark.reliability
def test_a_library_is_in_the_memory_of_every_rank(tmp_path: Path) -> None:
    a_library(tmp_path / "conda" / "lib" / "libjemalloc.so.2")
    script(tmp_path, "print('libjemalloc.so.2' in open('/proc/self/maps').read())")
    options = ("--memory_allocator", "jemalloc", "--nproc_per_node", "1")
    code, out, err = ended(launched(tmp_path, *options, CONDA_PREFIX=str(tmp_path / "conda")))
    assert (code, out) == (0, "True\n"), err
    assert "preloaded: libjemalloc.so.2" in err


@pytest.mark.parametrize(
    ("asked", "shown", "loaded"),
    [
        ("jemalloc", "preloaded: libjemalloc.so.2", "['libjemalloc.so.2']"),
        pytest.param("default", "preloaded: nothing", "[]", marks=pytest.mark.reliability),
        ("auto", "preloaded: libtcmalloc.so", "['libtcmalloc.so']"),
    ],
)
def test_the_allocator_that_is_asked_for_serves_a_rank_whose_user_preloads_another(
    asked: str, shown: str, loaded: str, tmp_path: Path
) -> None:
    a_library(tmp_path / "conda" / "lib" / "libjemalloc.so.2")
    theirs = a_library(tmp_path / "theirs" / "libtcmalloc.so")
    script(tmp_path, """
maps = open("/proc/self/maps").read()
print([name for name in ("libjemalloc.so.2", "libtcmalloc.so") if f"/{name}" in maps])
""")  # fmt: skip
    options = ("--memory_allocator", asked, "--nproc_per_node", "1")
    more = {"CONDA_PREFIX": str(tmp_path / "conda"), "LD_PRELOAD": str(theirs)}
    code, out, err = ended(launched(tmp_path, *options, **more))
    assert (code, out) == (0, f"{loaded}\n"), err
    assert shown in err
    assert ("gives way to --memory_allocator" in err) == (asked != "auto")


def test_torch_computes_with_the_threads_of_the_plan(tmp_path: Path) -> None:
    """torch reads MKL_NUM_THREADS, which many shells set, before OMP_NUM_THREADS."""
    script(tmp_path, "import torch\nprint(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())")
    more = {"MKL_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "1", **more), 120)
    assert code == 0, err
    planned, used = out.split()
    assert used == planned
    assert f"MKL_NUM_THREADS=1 gives way to the launcher's OMP_NUM_THREADS={planned}" in err
    assert "OMP_THREAD_LIMIT=1 gives way" in err


@pytest.mark.reliability
def test_a_library_that_does_not_load_ends_the_start(tmp_path: Path) -> None:
    """The linker prints one line and starts the program without the library."""
    library = a_library(tmp_path / "conda" / "lib" / "libjemalloc.so.2")
    broken = bytearray(library.read_bytes())
    broken[7] = 255  # for an operating system that does not exist
    library.write_bytes(broken)
    script(tmp_path, "time.sleep(600)")
    options = ("--memory_allocator", "jemalloc", "--nproc_per_node", "1")
    code, _, err = ended(launched(tmp_path, *options, CONDA_PREFIX=str(tmp_path / "conda")))
    assert code == 78
    assert "not loaded, though preloaded" in err


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    script(tmp_path, "")
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "2", "--dry_run"))
    assert (code, out) == (0, "")
    assert "rank 1: 1 thread" in err
    assert not list(tmp_path.glob("pid-*"))


def test_a_command_without_the_two_dashes_is_named(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "whet", "launch", "--nproc_per_node", "1", "qa", "--do_train"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 78
    assert "whet launch takes its command after --" in done.stderr
    assert "no option has this name" not in done.stderr


@pytest.mark.parametrize(
    ("options", "command", "words"),
    [
        ((), (), "there is nothing to launch"),
        (("--hosts", "h1,h2"), (), "there is nothing to launch"),
        (("--nnodes", "2", "--master_addr", "127.0.0.1"), (), "there is nothing to launch"),
        ((), ("no-such-program",), "what is to be launched does not exist"),
        ((), ("-m",), "-m has no name of a module after it"),
        (("--hosts", "h1,h2"), ("-m",), "-m has no name of a module after it"),
        (("--nproc_per_node", "2"), ("demo",), "whet demo runs in one process"),
        (("--hosts", "h1,h2"), ("predict",), "whet predict runs in one process"),
        (("--nproc_per_node", "two"), ("train.py",), "nproc_per_node is neither auto nor a number"),
        (("--master_addr", "10.0.0.1"), ("train.py",), "master_addr has no effect here"),
        (("--nproc_per_node", "4096"), ("train.py",), "4096 ranks do not fit on this machine"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    options: tuple[str, ...], command: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    script(tmp_path, "")
    code, out, err = ended(launched(tmp_path, *options, command=command))
    assert (code, out) == (78, "")
    assert words in err
    assert "fix:" in err


def test_a_command_of_whet_runs_as_one_rank(tmp_path: Path) -> None:
    code, out, err = ended(launched(tmp_path, command=("qa", "--help")), 120)
    assert code == 0, err
    assert "--do_train" in out


@pytest.mark.reliability
def test_the_master_port_can_be_chosen(tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], os.environ['GLOO_SOCKET_IFNAME'])")
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "2", "--master_port", "23458"))
    assert (code, out) == (0, "127.0.0.1 23458 lo\n"), err


@pytest.mark.reliability
def test_a_rank_that_is_killed_has_shown_what_it_printed(tmp_path: Path) -> None:
    script(tmp_path, """
print("the last words of rank", rank)
if rank:
    time.sleep(2)
    os.kill(os.getpid(), 9)
time.sleep(600)
""")  # fmt: skip
    code, out, err = ended(launched(tmp_path, "--nproc_per_node", "2"))
    assert code == 128 + signal.SIGKILL
    assert out == "the last words of rank 0\n"
    assert "  | the last words of rank 1" in err


@pytest.mark.reliability
def test_a_closed_terminal_ends_nothing_under_nohup(tmp_path: Path) -> None:
    script(tmp_path, "open(f'pid-{rank}-ready', 'w').write(str(os.getpid()))\ntime.sleep(3)\nprint('done')")
    words = ["nohup", sys.executable, "-m", "whet", "launch", "--nproc_per_node", "1", "--", "train.py"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    code, out, err = ended(process)
    assert (code, out) == (0, "done\n"), err


@pytest.mark.reliability
@pytest.mark.parametrize("words", [("--overwrite_output_dir",), ("--overwrite-output-dir", "true")])
def test_restarts_do_not_go_with_a_folder_to_overwrite(words: tuple[str, ...], tmp_path: Path) -> None:
    qa = ("qa", "--output_dir", "out", *words)
    process = launched(tmp_path, "--nproc_per_node", "1", "--max_restarts", "1", command=qa)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 78, err
    assert "overwrite_output_dir does not fit a command that is started again" in err


@pytest.mark.reliability
def test_job_that_torchrun_may_start_again_does_not_overwrite(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "whet", "qa", "--do_train", "--overwrite_output_dir", "--output_dir", "out",
             "--model_name_or_path", "model", "--train_file", "train.json"]  # fmt: skip
    where = os.environ | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    done = subprocess.run(words, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 78, done.stderr
    assert "--overwrite_output_dir with up to 3 restarts" in done.stderr


_HIDING = ("statistics", "queue", "types", "random")


def test_a_project_hides_no_module_of_python_from_whet_s_own_processes(tmp_path: Path) -> None:
    """`whet` looks into its own folder, and so do the processes that it starts: the user's have what Python gives."""
    for name in _HIDING:
        (tmp_path / f"{name}.py").write_text("raise AssertionError(__file__)\n")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "mine.py").write_text("")
    script(scripts, "import mine, queue, random, statistics\nprint('sees', sys.path[0])\n")
    whet = str(Path(sys.executable).with_name("whet"))
    for words, said in {
        ("qa", "--help"): "whet qa",
        ("scripts/train.py",): f"sees {scripts}",
        ("scripts/train.py", "--token", "one-of-mine"): f"sees {scripts}",
    }.items():
        command = [whet, "launch", "--nproc_per_node", "1", "--memory_allocator", "default", "--", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
