"""A script under `whet run` is Python's own process: words, exit code, traceback, signals; off changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.true_start,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="binds cores through calls of Linux"),
]

_SCRIPT = """
import json, multiprocessing, os, pickle, signal, sys, warnings

class Own:
    def __init__(self, n):
        self.n = n

def twice(n):
    return 2 * n

if __name__ == "__main__":
    own = pickle.loads(pickle.dumps(Own(7)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(twice, [own.n])
    warnings.warn("seen unless ignored")
    where = sorted(os.path.basename(path) for path in sys.path[:2])
    print(json.dumps([sys.argv[1:], __name__, type(own).__module__, doubled, where, sys.stdout.write_through]))
    print(os.environ.get("OTHER_RAN"))
    if "fail" in sys.argv:
        raise KeyError("of the script")
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the script, a module that is it, one of a shell, and a sitecustomize of the user's."""
    (tmp_path / "train.py").write_text(_SCRIPT, "utf-8")
    (tmp_path / "notes.sh").write_text("echo no Python\n", "utf-8")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['OTHER_RAN'] = 'yes'\n", "utf-8")
    return tmp_path


def started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WHET_RUN", "GOMP_"))}
    found = {**kept, "PYTHONPATH": str(folder / "site"), **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=found, capture_output=True, text=True, timeout=60, check=False
    )


def test_script_runs_as_python_runs_it(folder: Path) -> None:
    """Words, exit code, `__main__`, pickles, spawned processes, sys.path, Python's options, another sitecustomize."""
    words = ["-u", "-W", "ignore", "train.py", "--lr", "1", "a b"]
    plain, run = started(folder, *words), started(folder, "-m", "whet", "run", *words)
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout) == (3, plain.stdout)
    assert '["--lr", "1", "a b"], "__main__", "__main__", [14], ' in plain.stdout
    assert plain.stdout.endswith("yes\n")
    first, last = run.stderr.splitlines()
    assert first.startswith("whet run: -u -W ignore train.py ... runs unmodified on CPUs ")
    assert last.startswith("whet run: nothing was changed: no Trainer, accelerate, Lightning or spaCy got a model")


def test_traceback_of_a_script_is_its_own(folder: Path) -> None:
    plain = started(folder, "train.py", "fail")
    run = started(
        folder, "-m", "whet", "run", "--memory_allocator", "default", "--", sys.executable, "train.py", "fail"
    )
    own = [line for line in run.stderr.splitlines() if not line.startswith("whet run: ")]
    assert own == plain.stderr.splitlines()
    assert "KeyError: 'of the script'" in own
    assert run.returncode == plain.returncode == 1


def test_module_and_signal_of_a_script(folder: Path) -> None:
    """A signal that ends the script ends `whet run`, after its last line."""
    run = started(folder, "-m", "whet", "run", "-m", "train", "killed")
    assert run.returncode == -signal.SIGKILL
    assert any(line.startswith("whet run: nothing was changed") for line in run.stderr.splitlines())


def test_off_is_python_itself(folder: Path) -> None:
    """Nothing is said, bound, preloaded or set, and no process stays around the script."""
    show = "import os, sys; print(os.getppid() == int(sys.argv[1]), sorted(os.environ.items()))"
    (folder / "show.py").write_text(show, "utf-8")
    run = started(folder, "-m", "whet", "run", "show.py", str(os.getpid()), WHET_RUN="off")
    plain = started(folder, "show.py", str(os.getpid()), WHET_RUN="off")
    assert (run.stdout, run.stderr) == (plain.stdout, plain.stderr)
    assert run.stdout.startswith("True ")


def test_threads_that_the_user_has_set_stay_and_an_allocator_gives_way_to_the_option(folder: Path) -> None:
    theirs = folder / "libtcmalloc.so"
    theirs.symlink_to(next(place for place in Path("/").glob("lib*/*linux-gnu/libm.so.6")))
    (folder / "show.py").write_text(
        "import os\nnames = ('MKL_NUM_THREADS', 'OMP_NUM_THREADS', 'LD_PRELOAD')\n"
        "print([os.environ.get(name) for name in names])\n", "utf-8",
    )  # fmt: skip
    command = ("-m", "whet", "run", "--memory_allocator", "default", "--openmp", "default", "show.py")
    run = started(folder, *command, MKL_NUM_THREADS="3", OMP_NUM_THREADS="", LD_PRELOAD=str(theirs))
    assert run.stdout == "['3', '', None]\n", run.stderr
    assert f"{theirs.name} gives way to --memory_allocator default" in " ".join(run.stderr.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to run"),
        (["qa", "--do_train"], "leave run out: whet qa"),
        (["missing.py"], "no file here, and no program on PATH"),
        (["-Iu", "train.py"], "python -I keeps whet out of the script"),
        (["notes.sh"], "whet run -- bash notes.sh"),
        (["site"], "a folder without __main__.py"),
    ],
)
def test_what_cannot_run_is_refused(folder: Path, words: list[str], said: str) -> None:
    run = started(folder, "-m", "whet", "run", *words)
    assert run.returncode == 78
    assert said in run.stderr


def test_program_runs_where_a_folder_has_its_name(folder: Path) -> None:
    """Results are often kept in a folder that is named for the launcher."""
    (folder / "launcher").mkdir()
    program = folder / "bin" / "launcher"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho launched\n", "utf-8")
    program.chmod(0o755)
    run = started(folder, "-m", "whet", "run", "launcher", PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert (run.returncode, run.stdout) == (0, "launched\n")
