"""R12: one run per output folder, whoever comes second, and however the first one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from forked_runs import SOAK, Corpus, corpus, finish, hook, qa
from harness import count, trials_of

from whet.errors import OutputError, WhetError
from whet.watch import lock

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability
STARTS = 200 if SOAK else 20
_START = """
import os, sys, time
from pathlib import Path
from whet.errors import WhetError
from whet.watch import lock
assert "torch" not in sys.modules
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    with lock.output_folder(sys.argv[1], False):
        Path(sys.argv[1], f"written-by-{os.getpid()}").touch()
        print("won", flush=True)
        sys.stdin.read()
except WhetError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.mark.true_start  # without torch: many interpreters at one moment
def test_of_simultaneous_starts_exactly_one_wins(tmp_path: Path) -> None:
    """All of them at the same moment; each loser names the winner's process and host and writes nothing."""
    out = tmp_path / "out"
    moment = time.time() + 1 + 0.1 * STARTS  # two cores start so many interpreters meanwhile
    words = [sys.executable, "-c", _START, str(out), str(moment)]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starts = [subprocess.Popen(words, **how) for _ in range(STARTS)]
    deadline = time.monotonic() + 120
    while sum(start.poll() is None for start in starts) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    said = {start.pid: start.communicate()[0] for start in starts}
    won = [start.pid for start in starts if start.returncode == 0]
    lost = [start for start in starts if start.returncode == 73]
    assert (len(won), len(lost)) == (1, STARTS - 1), said
    named = f"process {won[0]} on {socket.gethostname()!r}"
    assert all(named in said[start.pid] for start in lost), said
    assert [path.name for path in out.iterdir()] == [f"written-by-{won[0]}"]
    print(f"of starts at one moment sent away, the holder named: {len(lost)}/{STARTS - 1}")


def test_a_killed_holder_frees_it(tmp_path: Path) -> None:
    """By kill -9, so that nothing of the holder's own can run; and though the children it forked live on."""
    free, n = 0, trials_of(20)
    for number in range(n):
        out = tmp_path / str(number)
        with _holder(out) as (pid, grandchild):
            with pytest.raises(OutputError, match=f"process {pid} on "), lock.output_folder(out, True):
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert (out / lock.LOCK_NAME).exists()
            os.kill(grandchild, 0)  # it is still there
            with lock.output_folder(out, False):  # and what the killed one left does not make the folder a full one
                free += 1
    count("free after its holder was killed", [True] * free, n)


@contextmanager
def _holder(out: Path) -> Iterator[tuple[int, int]]:
    """Fork a process that holds the folder, and from it one more, as loaders of data are; give both numbers."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with lock.output_folder(out, False):
            child = os.fork()
            if child:
                os.write(writing, f"{child}\n".encode())
            time.sleep(60)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        grandchild = int(pipe.readline())
    try:
        yield pid, grandchild
    finally:
        for process in (pid, grandchild):  # the test has ended the first already, unless it failed
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_the_second_run_leaves_before_it_imports_torch(corpus: Corpus, tmp_path: Path) -> None:
    """Within 2 s, most of which Python takes to start; nothing heavy has been imported by then."""
    out = tmp_path / "out"
    first = qa(corpus.words(out), tmp_path / "log", _in_step(3, tmp_path / "go"))
    assert first.until_told()
    words = [sys.executable, "-X", "importtime", "-m", "whet", *corpus.words(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    (tmp_path / "go").touch()
    assert done.returncode == 73, done.stderr
    assert re.search(rf"got: .*out, held by process {first.pid} on '{re.escape(socket.gethostname())}'", done.stderr)
    assert " torch" not in done.stderr, "a start that is refused costs no more than Python's own"
    spent_s = sum(int(us) for us in re.findall(r"^import time:\s+(\d+) \|", done.stderr, re.MULTILINE)) / 1e6
    assert spent_s < 2
    assert first.wait() == 0, first.text()
    assert not (out / lock.LOCK_NAME).exists()


def test_a_run_resumes_in_the_folder_of_a_killed_one(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = qa(corpus.words(out), tmp_path / "log", _in_step(30, tmp_path / "go"))
    assert killed.until_told()
    killed.kill(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert json.loads((out / lock.LOCK_NAME).read_text("utf-8"))["pid"] == killed.pid
    finish([*corpus.words(out), "--resume_from_checkpoint", "auto"], tmp_path / "log2")


def test_asking_the_model_needs_no_lock(corpus: Corpus, tmp_path: Path) -> None:
    """`whet ask` only reads: also from a folder in which a run is writing."""
    from whet.cli.main import main

    out = tmp_path / "out"
    finish(corpus.words(out, max_steps=1), tmp_path / "log")
    (tmp_path / "text").write_text("Mira keeps an old boat in Upper Tarn.", "utf-8")
    with lock.locked(out):
        words = ["ask", str(out), "--context", str(tmp_path / "text"), "--question", "Who?", "--max_seq_length", "40"]
        child = qa([*words, "--doc_stride", "12"], tmp_path / "log2")
        assert child.wait() == 0, child.text()
    assert callable(main)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("mine", "utf-8")
    (tmp_path / "out" / lock.LOCK_NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="cannot be locked"), lock.output_folder(tmp_path / "out", False):
        pass
    assert (tmp_path / "mine").read_text("utf-8") == "mine"


def test_two_names_of_one_folder_are_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with lock.output_folder(tmp_path / "out", False):
        told = _in_a_child(lambda: lock.output_folder(tmp_path / "link", False))
    assert "another run is writing" in told


def _in_a_child(attempt: Callable[[], object]) -> str:
    reading, writing = os.pipe()
    if not os.fork():
        try:
            with attempt():  # pyright: ignore[reportGeneralTypeIssues]
                os.write(writing, b"it holds it")
        except WhetError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def _in_step(call: int, go: Path) -> Callable[[Callable[[], None]], None]:
    """In the given micro-batch, until the file is there: another process comes meanwhile and is sent away."""
    return hook("whet.objectives.span", "PackedSpans.loss_sum", call, go)
