"""The end of the script of an export, which reads lines: what a signal does to the answer that it has begun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import whet.export

_ENDING = Path(whet.export.__file__).parent / "served" / "ending.py.txt"
_BEGINNING = """
import argparse, json, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def answer(n: int) -> dict:
    print(f"begins {n}", file=sys.stderr, flush=True)
    time.sleep(n)
    return {"answer": n}


"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals to other processes")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_after_the_line_that_it_answers(end: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(_BEGINNING + _ENDING.read_text("utf-8"), "utf-8")

    def started(*lines: dict[str, object]) -> subprocess.Popen[bytes]:
        pipe, line = subprocess.PIPE, [sys.executable, str(script)]
        process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None
        process.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in lines))
        process.stdin.flush()
        return process

    busy, idle = started({"n": 1}, {"n": 0}), started({"n": 0})
    assert busy.stderr is not None
    assert busy.stderr.readline() == b"begins 1\n"
    assert idle.stdout is not None
    answered = idle.stdout.readline()
    for process in (busy, idle):
        process.send_signal(end)
    assert busy.communicate(timeout=30) == (b'{"answer": 1}\n', b"")
    assert (answered, *idle.communicate(timeout=30)) == (b'{"answer": 0}\n', b"", b"begins 0\n")
    assert (busy.returncode, idle.returncode) == (0, 0)
