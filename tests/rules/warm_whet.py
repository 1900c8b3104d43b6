"""A `whet` for the docs' examples that begins at once: a process has everything heavy imported, and forks each command.

`Warm` starts it and writes a program `whet` that hands words, folder, environment and streams over to it. What runs
is the command's own `main`, in a process of its own; only the import of torch and transformers is not done anew.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

_HEAVY = ("whet.tasks.qa.job", "whet.jobs.run", "datasets", "transformers.models.bert.modeling_bert")
_LARGEST = 1 << 20
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
told = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect({address!r})
    socket.send_fds(line, [json.dumps(told).encode()], [0, 1, 2])
    sys.exit(int(line.recv(100) or b"99"))
"""


class Warm:
    """The process, and the folder of its program."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        address = str(folder / "line")
        (self.bin / "whet").write_text(_PROGRAM.format(python=sys.executable, address=address), "utf-8")
        (self.bin / "whet").chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, __file__, address],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the process and what it has forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def serve(address: str) -> None:
    """Answer each command with its exit code."""
    for name in _HEAVY:
        import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen()
        print("ready", flush=True)
        while True:
            line, _ = door.accept()
            with line:
                told, streams, _, _ = socket.recv_fds(line, _LARGEST, 3)
                line.send(str(_run(json.loads(told), streams)).encode())


def _run(told: dict, streams: list[int]) -> int:
    child = os.fork()
    if child == 0:
        _become(told, streams)
    for stream in streams:
        os.close(stream)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


def _become(told: dict, streams: list[int]) -> None:
    """Do the command in this child; does not return."""
    code: object = 99
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        sys.argv = ["whet", *told["words"]]
        from whet.cli.main import main

        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


if __name__ == "__main__":
    serve(sys.argv[1])
