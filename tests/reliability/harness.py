"""Trials with real faults: a fork server, kills by processor time, system calls that fail by strace; honest counts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from usage import cpu_s

Trial = TypeVar("Trial")
_HERE = Path(__file__).resolve().parent
_AT_ONCE = 2
_LONGEST_S = 300.0
TIMES = float(os.environ.get("WHET_RELIABILITY_TIMES", "1"))
"""How often the gate's number of trials is taken; the night run sets it."""
SEED = int(os.environ.get("WHET_TEST_SEED", "0"))
"""Added to the seed of all random moments and damages; the night run takes another one each night."""
CHANGING_CALLS = (
    "openat", "write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "fallocate", "copy_file_range",
    "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "msync",
)  # fmt: skip
"""System calls that leave the disk another one than before, or open what is about to."""


NO_STRACE = ("strace is missing, or may not trace here", "the package strace and the right to trace (ptrace)")

READING_CALLS = ("newfstatat", "fstat", "statx", "stat", "lstat", "getdents64", "read", "lseek", "close", "fcntl")
"""System calls that only ask, and yet fail on a disk that is lost or a file handle that is stale."""


def trials_of(gate: int) -> int:
    """Return how many trials to run where the gate asks for this many."""
    return max(1, round(gate * TIMES))


def count(name: str, results: Iterable[bool], wanted: int) -> None:
    """Print n/N and require all of N; a trial that did not take place counts as not passed."""
    passed = sum(results)
    print(f"{name}: {passed}/{wanted}")
    assert passed == wanted, f"{name}: {passed}/{wanted}"


def at_once(work: Callable[[Trial], bool], trials: Iterable[Trial]) -> list[bool]:
    """Return what the work says of each trial, two at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, trials))


class Server:
    """The fork server, from this side."""

    def __init__(self) -> None:
        paths = [str(_HERE), str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "fork_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._lock = threading.Lock()
        self.prepared = Path(self._read())
        """Output folders of the runs that wait to save, by name."""

    def start(self, name: str, **given: Any) -> int:
        """Fork a trial; return its pid."""
        return self._ask({"start": name, "given": given})

    def wait(self, child: int) -> int:
        """Return the exit code of a trial, or minus the signal that ended it."""
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            status = self._ask({"ask": child})
            if status is not None:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.003)
        os.kill(child, signal.SIGKILL)
        raise TimeoutError(f"a trial took more than {_LONGEST_S} s")

    def run(self, name: str, **given: Any) -> int:
        """Run a trial to its end; return its exit code."""
        return self.wait(self.start(name, **given))

    def run_until(self, limit_s: float, name: str, **given: Any) -> int:
        """Run a trial and kill it with SIGKILL once it has had so much processor time."""
        child = self.start(name, **given)
        while (used_s := cpu_s(child)) is not None and used_s < limit_s:
            time.sleep(0.0005)
        if used_s is not None:
            os.kill(child, signal.SIGKILL)
        return self.wait(child)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@dataclass(frozen=True)
class Fault:
    """What happens to the k-th use of a system call: an error by name, or SIGKILL."""

    call: str
    k: int
    error: str | None = None

    @property
    def injection(self) -> str:
        """The fault in strace's words."""
        return f"inject={self.call}:{f'error={self.error}' if self.error else 'signal=SIGKILL'}:when={self.k}"


def ptrace_works() -> bool:
    """Return whether strace is there and may trace: containers often forbid it."""
    if shutil.which("strace") is None:
        return False
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False)
    return tried.returncode == 0


@contextmanager
def traced(server: Server, folder: Path, fault: Fault | None, **given: Any) -> Iterator[Callable[[], int]]:
    """Start a `save_once` in the folder under strace; yield a function that lets it go and returns its exit code."""
    ready, go, log = folder / "ready", folder / "go", folder / "trace"
    child = server.start("save_once", folder=str(folder), ready=str(ready), go=str(go), **given)
    _until(ready.exists)
    calls = ",".join(f"?{call}" for call in (*CHANGING_CALLS, *READING_CALLS))  # ? for what not every processor has
    command = ["strace", "-f", "-y", "-p", str(child), "-o", str(log), "-e", f"trace={calls}"]
    command += ["-e", fault.injection] if fault else []
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    tracer.stderr.readline()  # "attached"

    def release() -> int:
        go.touch()
        code = server.wait(child)
        tracer.communicate(timeout=30)
        return code

    yield release


def calls_in(trace: Path, wanted: Sequence[str] = CHANGING_CALLS) -> dict[str, int]:
    """Return how often each of the wanted system calls occurs in a trace."""
    found: dict[str, int] = {}
    for line in trace.read_text("utf-8", errors="replace").splitlines():
        name = line.split("(")[0].split()[-1]
        if name in wanted:
            found[name] = found.get(name, 0) + 1
    return found


def same_folder(first: Path, second: Path, *, but: tuple[str, ...] = ()) -> list[str]:
    """Return the names of files that are not the same, byte for byte, in both folders."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()} - set(but)
    return sorted(name for name in names if _bytes(first / name) != _bytes(second / name))


def _bytes(path: Path) -> bytes | None:
    """Return what is in the file, without what is another each time: which run wrote it, and how long that took."""
    if not path.is_file():
        return None
    if path.name not in (_MANIFEST, _STATE):
        return path.read_bytes()
    facts = json.loads(path.read_bytes())
    if path.name == _MANIFEST:
        facts = {name: value for name, value in facts.items() if name not in _OF_THE_RUN}
        facts["files"] |= {_STATE: None} if _STATE in facts["files"] else {}
    else:
        facts["meter"]["totals"] |= dict.fromkeys(_TIMES)
    return json.dumps(facts, sort_keys=True).encode()


_MANIFEST, _STATE = "MANIFEST.json", "state.json"
_OF_THE_RUN = ("run", "parents", "checksum")
_TIMES = ("elapsed_s", "training_s")


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONGEST_S
    while not true():
        if time.monotonic() > until:
            raise TimeoutError("a trial did not get ready")
        time.sleep(0.002)
