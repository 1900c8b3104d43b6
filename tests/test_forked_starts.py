"""A Python process that is forked behaves as one that is started; and what only a true start shows is truly started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forked_starts import STARTS

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["forked", "true"])
def python(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs Python with these words, forked or truly started, in a folder of its own."""
    monkeypatch.setattr(STARTS, "forked", request.param == "forked")

    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        before = STARTS.n_forked
        given = {"capture_output": True, "text": True, "check": False, "cwd": tmp_path} | options
        done = subprocess.run([sys.executable, *words], **given)
        assert STARTS.n_forked - before == (request.param == "forked")
        return done

    return run


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("print('a'); import sys; print('b', file=sys.stderr)", 0, "a\n", "b\n"),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import threading, time; threading.Timer(0.1, print, ['late']).start()", 0, "late\n", ""),
        ("import os; os._exit(7)", 7, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "", ""),
        ("import sys; print(sys.stdin.read().upper())", 0, "GIVEN\n", ""),
    ],
)
def test_a_program_ends_with_its_status_and_streams(python: Run, code: str, status: int, out: str, err: str) -> None:
    done = python("-c", code, input="given")
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_an_error_and_ctrl_c_end_it_with_a_traceback_of_its_own_frames(python: Run) -> None:
    failed = python("-c", "1 / 0")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[1:] == [
        '  File "<string>", line 1, in <module>', "ZeroDivisionError: division by zero",
    ]  # fmt: skip
    assert python("-W", "ignore", "-c", "import warnings; warnings.warn('x')").stderr == ""
    stopped = python("-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert stopped.returncode == -signal.SIGINT
    assert stopped.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "forked_starts" not in stopped.stderr


_FACTS = """
import os, sys
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["LINES"], "COLUMNS" in os.environ)
print(os.getppid(), os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/fd")), os.umask(0))
"""


def test_a_program_gets_its_words_folder_variables_and_session(python: Run, tmp_path: Path) -> None:
    names = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"LINES": "9"}
    (tmp_path / "script.py").write_text(_FACTS, "utf-8")
    old = os.umask(0o027)
    try:
        coded = python("-c", _FACTS, "a", "b c", env=names, start_new_session=True)
        script = python("script.py", "--d", env=names)
        module = python("-m", "script", "e", env=names)
    finally:
        os.umask(old)
    here, whose = str(tmp_path.resolve()), f"{os.getpid()}"
    assert coded.stdout.splitlines() == [f"__main__ ['-c', 'a', 'b c']  {here} 9 False", f"{whose} True 4 23"], coded
    assert script.stdout.splitlines() == [f"__main__ ['script.py', '--d'] {here} {here} 9 False", f"{whose} False 4 23"]
    assert module.stdout.splitlines()[0] == f"__main__ ['{here}/script.py', 'e'] {here} {here} 9 False"


def test_a_process_can_be_stopped_polled_and_ended(python: Run) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    assert os.getpgid(process.pid) == process.pid
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_a_forked_process_trains(python: Run, tmp_path: Path) -> None:
    """Autograd and the thread of pyarrow's allocator work in it."""
    code = "import torch, pyarrow; w = torch.ones(300, 300, requires_grad=True); (w @ w).sum().backward(); " \
           "print(int(w.grad.sum()), pyarrow.array([1] * 9999).nbytes)"  # fmt: skip
    assert python("-c", code).stdout == "54000000 79992\n"


def test_two_forked_processes_draw_other_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STARTS, "forked", True)
    code = [sys.executable, "-c", "import random, secrets; print(random.random(), secrets.token_hex(8))"]
    found = {subprocess.run(code, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-X", "dev", "-c", "pass"], {}),
        (["-W", "error", "-c", "pass"], {}),
        (["-m", "whet", "launch", "--help"], {}),
        (["-c", "pass"], {"OMP_NUM_THREADS": "3"}),
        (["-c", "pass"], {"HF_HOME": "elsewhere"}),
        (["-c", "pass"], {"PYTHONHASHSEED": "5"}),
        (["-c", "pass"], {"cwd": "shadow"}),
        (["-c", "pass"], {"PYTHONPATH": "shadow"}),
        (["-c", "pass"], {"preexec_fn": os.getpid}),
        (["-c", "pass"], {"pass_fds": (2,)}),
    ],
    ids=str,
)
def test_what_a_fork_would_not_show_is_truly_started(
    words: list[str], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "numpy.py").write_text("", "utf-8")
    monkeypatch.setattr(STARTS, "forked", True)
    monkeypatch.chdir(tmp_path)
    variables = {name: value for name, value in options.items() if name.isupper()}
    given = {name: value for name, value in options.items() if not name.isupper()}
    before = STARTS.n_forked
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=os.environ | variables, **given)
    assert STARTS.n_forked == before


def test_a_folder_without_python_in_it_shadows_nothing(python: Run, tmp_path: Path) -> None:
    """Such as the built `site` of the docs in a checkout: the module of that name is the one that is imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("", "utf-8")
    assert python("-c", "import site; print(bool(site.__file__))", cwd=tmp_path).stdout == "True\n"


@pytest.mark.true_start
def test_a_test_about_the_start_has_true_ones() -> None:
    code = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == "False\n"
