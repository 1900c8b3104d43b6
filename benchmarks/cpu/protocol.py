"""How the benchmark talks with its worker processes: one JSON object a line, each way. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_STEERING = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TOKENIZERS_PARALLELISM", "ATEN_", "DNNL_")
"""Variables that would steer a worker's threads, memory or kernels: none is handed on, so all run as installed."""


class Channel:
    """A worker's end. What libraries print goes to the error stream from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def read(self) -> dict[str, Any]:
        """Wait for the next command; without a driver it is stop."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "stop"}

    def answer(self, **facts: Any) -> None:
        """Send an answer."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()


class WorkerFailedError(RuntimeError):
    """A worker ended before it answered; the message holds the end of its log."""


class Worker:
    """The driver's end: a process that is up, and does one thing each time it is asked."""

    def __init__(self, command: Sequence[str], log: Path, *, n_threads: int, with_whet: bool) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment(n_threads, with_whet=with_whet),
            )  # fmt: skip
        self.ready: dict[str, Any] = {}
        """What the worker reported about itself when it was ready."""

    def warm_up(self) -> Worker:
        """Wait until the worker is ready, and let it take the first step; it is closed if that fails."""
        try:
            self.wait_ready()
            self.ask("step")
        except BaseException:
            self.close()
            raise
        return self

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the worker can take commands; return what it tells of itself."""
        self.ready = self._answer()
        return self.ready

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the answer, or that there is none, tells why
            self.process.stdin.write(json.dumps({"do": do} | words) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def peak_bytes(self) -> int:
        """Return the most memory that the process has held so far (VmHWM)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def processor_s(self) -> float:
        """Return the processor time of all threads of the process so far (proc(5), /proc/pid/stat)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended before it read the last command
            self.process.stdin.close()  # the worker reads this as stop
        self.process.stdout.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise WorkerFailedError(f"{' '.join(map(str, self.process.args))} ended early; its last words:\n{tail}")
        return json.loads(line)


def environment(n_threads: int, *, with_whet: bool) -> dict[str, str]:
    """Return the variables of a worker: this process's, without what steers threads and memory, but their number.

    Without `with_whet` the worker does not get PYTHONPATH either: a peer shall find no whet.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    if not with_whet:
        kept.pop("PYTHONPATH", None)
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return kept | quiet | {"OMP_NUM_THREADS": str(n_threads)}
